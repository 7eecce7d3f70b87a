"""The ranks along one axis of a mesh that hold the same stage.

The one idea: what such ranks do together is said once, whatever the axis. Left out: what only one axis does
(``pipeline/gradients/data_axis.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.transport.channel import Waiting, nobody_waits


class AxisLine:
    """This rank's line along an axis.

    Args:
        ranks: its global ranks, by place along the axis.
        group: their process group, None for the default one.
        waiting: a context entered while this process is blocked.

    Attributes:
        place: this rank's place along the axis.
    """

    def __init__(self, ranks: Sequence[int], group: Any = None, waiting: Waiting = nobody_waits) -> None:
        self.ranks, self.group, self.waiting = tuple(ranks), group, waiting
        self.place = self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.ranks)

    def equalize(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the first one's values, in place."""
        if self.size > 1:
            with self.waiting("the other copies of the model, to begin alike"):
                for tensor in tensors:
                    dist.broadcast(tensor, self.ranks[0], group=self.group)

    def agree(self, what: str, value: Sequence[str]) -> None:
        """Raise unless all ranks of the line give it the same.

        Raises:
            ValueError: they do not.
        """
        everyone: list[Any] = [list(value)] * self.size
        if self.size > 1:
            with self.waiting(f"the other copies' {what}"):
                dist.all_gather_object(everyone, list(value), group=self.group)
        unlike = [rank for rank, others in zip(self.ranks, everyone, strict=True) if others != everyone[0]]
        if unlike:
            raise ValueError(
                f"The ranks added different parameters to {what} (rank {unlike[0]} unlike rank {self.ranks[0]}). Add"
                " the same on every rank; decide by what all ranks see alike."
            )
