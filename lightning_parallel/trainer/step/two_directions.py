"""Steps that end on several ranks: what each one's micro-batches gave becomes known to the first of them.

The one idea: with replicas of the pipeline the last stage lies on several ranks, and each sees the loss of its own
micro-batches. Whatever a step gives there (what it returns, its `self.log` notes, what it updates metrics with) is one
picklable `RankResults`. When a rank's forwards are done it packs its share and sends it; the first rank joins all of
them in the order of micro-batches and goes on as if it had run them itself.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.transport.parcel import Parcel, unpack
from lightning_parallel.trainer.metrics.replay import MetricUpdate
from lightning_parallel.trainer.step.step_log import LogNote


@dataclass
class RankResults:
    """What the micro-batches of one rank gave.

    Attributes:
        results: what the step returned, by micro-batch.
        notes: of `self.log`, in order.
        updates: of metrics, in order.
        is_void: nothing came of the step.
    """

    results: Mapping[int, Any]
    notes: list[LogNote] = field(default_factory=list)
    updates: list[MetricUpdate] = field(default_factory=list)
    is_void: bool = False


@lru_cache(maxsize=256)
def ended_on(schedule: Schedule, row: int) -> frozenset[int]:
    """The micro-batches whose last stage is on a row."""
    last = schedule.num_stages - 1
    return frozenset(a.microbatch for a in schedule.actions[row] if a.kind == "F" and a.stage == last)


class Directions:
    """Brings shares to the first rank of the loss; of no use where there is only one.

    Args:
        pipeline: what knows the ranks and has the channels.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._parcel: Parcel | None = None
        self._aside = torch.cuda.Stream(pipeline.device) if pipeline.device.type == "cuda" else None
        self._done: Any = None

    def forwards_done(self) -> None:
        """On the first rank, behind its last forward: what is joined waits for nothing later."""
        self._done = torch.cuda.current_stream(self._pipeline.device).record_event() if self._aside else None

    def pack(self, share: RankResults) -> None:
        """On another rank, behind its last forward; on a host what was packed leaves at once."""
        self._parcel = Parcel(share, self._pipeline.device)
        if self._aside is None:
            self.hand_over()

    def hand_over(self) -> None:
        """At the end of a step: what was packed leaves, if it has not."""
        if self._parcel is None:
            return
        channel = self._pipeline.reports[self._pipeline.row]
        channel.settle()
        self._parcel.send(channel, self._pipeline.waiting)
        self._parcel = None

    def receive(self, schedule: Schedule) -> list[RankResults]:
        """On the first rank: the shares of those others that had a forward of the last stage in this step."""
        found = []
        for row, channel in self._pipeline.reports.items():
            if ended_on(schedule, row):
                taken = channel.receive_object("what the micro-batches of another replica gave")
                found.append(unpack(taken, self._pipeline.device))
        return found

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Around the work on shares: on a CUDA device beside the step's last backwards, on a stream of its own."""
        if self._aside is None:
            yield
            return
        main = torch.cuda.current_stream(self._pipeline.device)
        if self._done is not None:
            self._aside.wait_event(self._done)
        else:
            self._aside.wait_stream(main)
        self._done = None
        with torch.cuda.stream(self._aside):
            yield
        main.wait_stream(self._aside)


@contextmanager
def filling_seen(module: LightningModule, step: str) -> Iterator[None]:
    """Around a step's micro-batches on a rank where steps end: warns of lists and the like in which steps collect.

    Each rank's would hold the micro-batches of its own replica. Left out: numbers that a step counts up.
    """
    before = _sizes_of(module)
    yield
    for name, size in _sizes_of(module).items():
        if size > before.get(name, size):
            warnings.warn(
                f"{step} fills `self.{name}`, which with a schedule of two directions holds one direction's"
                " micro-batches on each rank that ends steps. Log values in the step, give them to a torchmetrics"
                " object, or use a schedule of one direction.",
                stacklevel=2,
            )


def _sizes_of(module: LightningModule) -> dict[str, int]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: len(value) for name, value in own.items() if isinstance(value, (list, dict, set, deque))}
