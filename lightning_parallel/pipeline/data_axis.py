"""What the copies of a stage do together along the data axis: equal values at the start, the mean of gradients.

The one idea: a copy of the model is a pipeline of its own. The ranks that hold the same stage in different copies see
different rows, so their gradients are averaged, once a step of the optimizer, as soon as the stage's own backwards are
done: while the earlier stages still work, the later ones already talk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.pipeline.channel import Waiting, nobody_waits

_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel has it


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
            ValueError: a gradient is sparse.
        """
        if self.size == 1:
            return
        with self.waiting("the other copies of the model, to average gradients"):
            self._agree_on_gradients(parameters)
            gradients = [p.grad for p in parameters if p.grad is not None]
            if any(gradient.is_sparse for gradient in gradients):
                raise ValueError("A gradient is sparse, which the data axis does not average. Use sparse=False.")
            sent = [(bucket, *self._start(bucket)) for bucket in _buckets(gradients)]
            for bucket, flat, work in sent:
                work.wait()
                for gradient, mean in zip(bucket, _views(flat, bucket), strict=True):
                    gradient.copy_(mean).div_(self.size)

    def _agree_on_gradients(self, parameters: Sequence[Tensor]) -> None:
        """A parameter that some copy has a gradient for gets one of zeros where there is none; agreed on the host."""
        made = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(made, op=dist.ReduceOp.MAX, group=self.group)
        for parameter, somewhere in zip(parameters, made.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _start(self, bucket: Sequence[Tensor]) -> tuple[Tensor, Any]:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        return flat, dist.all_reduce(flat, group=self.group, async_op=True)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to a bucket's size."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= _BUCKET_BYTES or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _views(flat: Tensor, bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parts of a flat tensor that stand for a bucket's tensors."""
    for part, tensor in zip(flat.split([tensor.numel() for tensor in bucket]), bucket, strict=True):
        yield part.view(tensor.shape)
