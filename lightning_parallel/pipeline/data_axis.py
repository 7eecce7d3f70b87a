"""What the copies of a stage do together along the data axis: equal values at the start, the mean of gradients.

The one idea: a copy of the model is a pipeline of its own. The ranks that hold the same stage in different copies see
different rows, so their gradients are averaged, once a step of the optimizer, as soon as the stage's own backwards are
done: while the earlier stages still work, the later ones already talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.buckets import buckets, views
from lightning_parallel.pipeline.channel import Waiting, nobody_waits


class DataAxis:
    """The ranks that hold one stage in every copy of the model.

    Args:
        ranks: their global ranks, copy by copy.
        group: their process group, None for the default one.
        waiting: a context entered while this process is blocked.
    """

    def __init__(self, ranks: Sequence[int], group: Any = None, waiting: Waiting = nobody_waits) -> None:
        self.ranks, self.group, self.waiting = tuple(ranks), group, waiting

    @property
    def size(self) -> int:
        return len(self.ranks)

    def equalize(self, tensors: Sequence[Tensor]) -> None:
        """Give every copy the first copy's values, in place."""
        if self.size > 1:
            with self.waiting("the other copies of the model, to begin alike"):
                for tensor in tensors:
                    dist.broadcast(tensor, self.ranks[0], group=self.group)

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Average `grad` over the copies, in place; where only some copies have one, the others count as zero.

        Raises:
            ValueError: a gradient is sparse; another copy has come to a pause.
        """
        if self.size == 1:
            return
        with self.waiting("the other copies of the model, to average gradients"):
            somewhere = self._agree([parameter.grad is not None for parameter in parameters], False)
            for parameter, made in zip(parameters, somewhere, strict=True):
                if made and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters if p.grad is not None]
            if any(gradient.is_sparse for gradient in gradients):
                raise ValueError("A gradient is sparse, which the data axis does not average. Use sparse=False.")
            sent = [(bucket, *self._start(bucket)) for bucket in buckets(gradients)]
            for bucket, flat, work in sent:
                work.wait()
                for gradient, mean in zip(bucket, views(flat, bucket), strict=True):
                    gradient.copy_(mean).div_(self.size)

    def pause(self, parameters: Sequence[Tensor]) -> None:
        """Where an epoch or an evaluation begins or training ends: all copies have to be there.

        Raises:
            ValueError: another copy still has batches to train on.
        """
        if self.size > 1:
            with self.waiting("the other copies of the model, at the end of an epoch"):
                self._agree([False] * len(parameters), True)

    def _agree(self, made: list[bool], pausing: bool) -> list[int]:
        """On the host: how many copies have a gradient for each parameter, and that all or none of them pause."""
        votes = torch.tensor([*made, pausing], dtype=torch.int32)
        dist.all_reduce(votes, group=self.group)
        *counts, ended = votes.tolist()
        if 0 < ended < self.size:
            raise ValueError(
                f"{ended} of {self.size} copies of the model have come to the end of their training batches, the others"
                " have more. All copies need as many: use a map-style dataset (Lightning deals its rows evenly),"
                " limit_train_batches=, or an iterable that gives every copy the same number of batches."
            )
        return counts

    def _start(self, bucket: Sequence[Tensor]) -> tuple[Tensor, Any]:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        return flat, dist.all_reduce(flat, group=self.group, async_op=True)
