"""Tensors laid together for one all-reduce, and taken apart again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel has it


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to a bucket's size."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= BUCKET_BYTES or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def views(flat: Tensor, bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parts of a flat tensor that stand for a bucket's tensors."""
    for part, tensor in zip(flat.split([tensor.numel() for tensor in bucket]), bucket, strict=True):
        yield part.view(tensor.shape)


class BucketSum:
    """A bucket on its way through an all-reduce, which begins here.

    Args:
        bucket: tensors of one dtype; what is written to them later is not in the sum.
        group: the ranks that add up.
    """

    def __init__(self, bucket: Sequence[Tensor], group: Any) -> None:
        self._bucket, self._flat = bucket, torch.cat([tensor.reshape(-1) for tensor in bucket])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """The sums, one for each tensor."""
        self._work.wait()
        return list(views(self._flat, self._bucket))
