"""Tensors laid together for one all-reduce, and taken apart again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel has it


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
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


def views(flat: Tensor, bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parts of a flat tensor that stand for a bucket's tensors."""
    for part, tensor in zip(flat.split([tensor.numel() for tensor in bucket]), bucket, strict=True):
        yield part.view(tensor.shape)
