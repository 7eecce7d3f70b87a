"""Metrics where steps end on several ranks: what micro-batches did to them is undone, and done again in their order.

The one idea: with replicas of the pipeline, each rank that ends steps updates its metric objects with its own
micro-batches as they run, since a step may use what a metric's forward gives. Meanwhile every lasting update is noted.
When all are there, the first rank puts its metrics back to where they were before the step and makes all ranks' updates
in the order of micro-batches; the other ranks put theirs back too. So the state of a metric is one process's, on the
first rank alone, as it is with one direction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection


@dataclass(frozen=True)
class MetricUpdate:
    """An update of a metric by a micro-batch."""

    microbatch: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Watched(Protocol):
    """A metric with its name and the methods that it had before it was watched."""

    metric: Metric
    name: str
    before: dict[str, Any]

    def __hash__(self) -> int: ...  # a metric's own changes with its state


class MetricReplay:
    """The updates of one step after another.

    Args:
        collections: of the module, whose members share their states.

    Attributes:
        microbatch: the one that runs.
        updates: those of this rank's micro-batches in this step.
    """

    def __init__(self, collections: Sequence[MetricCollection]) -> None:
        self.microbatch, self.updates = 0, list[MetricUpdate]()
        self._collections, self._depth = collections, 0
        self._before: dict[Watched, dict[str, Any]] | None = None

    @property
    def is_on(self) -> bool:
        """Whether updates are noted: from the beginning of a step to its replay."""
        return self._before is not None

    def begin(self) -> None:
        """A step begins."""
        self._before, self.updates = {}, []

    def keep(self, watched: Watched) -> None:
        """A metric is going to change."""
        if self._before is not None and watched not in self._before:
            self._before[watched] = state_of(watched.metric)

    def update(self, watched: Watched, lasts: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Update a metric, and note it: not what a metric made of others does to them, that comes with its own."""
        if self.is_on and lasts and self._depth == 0 and _lasts(watched.metric):
            taken = tree_map_only(Tensor, Tensor.detach, (args, dict(kwargs)))
            self.updates.append(MetricUpdate(self.microbatch, watched.name, *taken))
        self._depth += 1
        try:
            watched.before["update"](*args, **kwargs)
        finally:
            self._depth -= 1

    def refuse_reset(self, name: str) -> None:
        """Raise if a step resets a metric, rather than torchmetrics' own forward.

        Raises:
            ValueError: it does.
        """
        if self.is_on and not _inside_forward():
            raise ValueError(
                f"The step resets metric `{name}`, which with a schedule of two directions would forget some"
                " micro-batches and keep others. Reset it in a hook, or use a schedule of one direction."
            )

    def run(self, others: Sequence[MetricUpdate], watched: Mapping[str, Watched]) -> None:
        """On the first rank: all updates of the step, this rank's and others', in the order of micro-batches."""
        updates = sorted([*self.updates, *others], key=lambda update: update.microbatch)
        self._put_back()
        led = {id(metric) for metric in self._led()}
        for update in updates:
            if id(watched[update.name].metric) not in led:
                watched[update.name].before["update"](*update.args, **update.kwargs)
        for collection in self._collections:
            collection._state_is_copy = False
            collection._compute_groups_create_state_ref()
        for metric in self._led():
            metric._computed = None

    def end(self) -> None:
        """On the other ranks, at the end of a step: metrics are as they were; what they took has been sent."""
        if not self.is_on:
            return
        self._put_back()
        for collection in self._collections:  # of each member the first rank has to hear, every time
            if collection._enable_compute_groups is True:
                collection._groups_checked = False
                collection._init_compute_groups()

    def _led(self) -> Iterator[Metric]:
        """Metrics that take over the state of another one of their collection."""
        for collection in self._collections:
            if collection._groups_checked:
                for members in collection._groups.values():
                    yield from (getattr(collection, name) for name in members[1:])

    def _put_back(self) -> None:
        for watched, state in (self._before or {}).items():
            del state["_forward_cache"]  # right if it saw the whole batch, and otherwise replaced when the step ends
            vars(watched.metric).update(state)
        self._before, self.updates = None, []


def state_of(metric: Metric) -> dict[str, Any]:
    """A copy of what an update changes."""
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    state = {name: vars(metric)[name] for name in names}
    return {k: v.clone() if isinstance(v, Tensor) else list(v) if isinstance(v, list) else v for k, v in state.items()}


def _lasts(metric: Metric) -> bool:
    """Whether an update lasts: of the two that some metrics' forwards make, the second is of the batch alone."""
    twice = metric.full_state_update or metric.full_state_update is None or metric.dist_sync_on_step
    return metric._should_unsync or not twice


def _inside_forward() -> bool:
    """Whether torchmetrics' own forward is what called the metric's reset."""
    frame = sys._getframe(3)
    while frame is not None and ("torchmetrics" in frame.f_code.co_filename or frame.f_code.co_name == "reset"):
        if frame.f_code.co_name.startswith("_forward_"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
