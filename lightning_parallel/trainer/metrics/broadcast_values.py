"""Values of metrics as the loss stage tells them and the other ranks hear them.

The one idea: a told value carries the moment it holds for (steps run, resets, updates), so that one which only rank 0
asked for makes nobody wait and is passed over by the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.trainer.metrics.watched_metric import WatchedMetric


@dataclass(frozen=True)
class _BroadcastValue:
    """A metric's value and the moment it holds for: steps run, then resets and updates outside steps."""

    name: str
    by_lightning: bool
    moment: tuple[int, int]
    value: Any


class BroadcastValues:
    """What the loss stage told of metrics since the last step.

    Args:
        pipeline: what tells and hears.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._told: dict[tuple[str, bool], list[_BroadcastValue]] = {}

    def forget(self) -> None:
        """A step begins: what was told before it holds no longer."""
        self._told.clear()

    def tell(self, watched: WatchedMetric, by_lightning: bool, value: Any) -> None:
        """On the rank of the loss: a value that it computed."""
        value = tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), value)
        self._pipeline.tell(_BroadcastValue(watched.name, by_lightning, watched.moment, value))

    def hear_other(self) -> Any:
        """What the loss stage tells that is no metric's value; those that nobody here asked for are passed over."""
        told = self._pipeline.hear()
        while isinstance(told, _BroadcastValue):
            told = self._pipeline.hear()
        return told

    def hear(self, watched: WatchedMetric, by_lightning: bool, num_steps: int) -> Any:
        """The value that the loss stage told for this moment, on the metric's device.

        What Lightning reads it reads once on every rank, though on rank 0 maybe earlier, for the progress bar: one
        message a reading. What the user computes holds as long as nobody steps, updates or resets.

        Raises:
            RuntimeError: the loss stage did not compute it.
        """
        wanted = (num_steps, 0) if by_lightning else watched.moment
        known = self._told.setdefault((watched.name, by_lightning), [])
        while True:
            while known and known[0].moment < wanted:
                known.pop(0)
            if known:
                value = (known.pop(0) if by_lightning else known[0]).value
                return tree_map_only(Tensor, lambda t: t.to(watched.metric.device), value)
            told = self._pipeline.hear(f"metric `{watched.name}`, which rank 0 must compute too")
            if not isinstance(told, _BroadcastValue):
                raise RuntimeError(
                    f"Rank {self._pipeline.rank} computes metric `{watched.name}`, which rank 0 did not compute. Only"
                    " rank 0 (the last stage) holds what a metric has seen: compute it on every rank."
                )
            self._told.setdefault((told.name, told.by_lightning), []).append(told)
