"""Tensors as the raw bytes that travel, in the order in which they lie in memory."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta


@lru_cache(maxsize=4096)
def storage_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest in memory; None for contiguous, and where memory has gaps."""
    order = sorted(range(len(meta.shape)), key=lambda d: -meta.stride[d])
    expected = 1
    for d in reversed(order):
        if meta.shape[d] != 1 and meta.stride[d] != expected:
            return None
        expected *= meta.shape[d]
    return None if order == sorted(order) else tuple(order)


def empty(meta: TensorMeta, device: torch.device) -> Tensor:
    """Memory for a tensor, laid out as the meta says."""
    order = storage_order(meta)
    if order is None:
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)
    in_memory = torch.empty([meta.shape[d] for d in order], dtype=meta.dtype, device=device)
    return in_memory.permute([order.index(d) for d in range(len(order))])


def to_bytes(tensor: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    """The bytes of a tensor with its dimensions in an order; of one that lies so in memory, a view."""
    tensor = tensor.detach()
    if order is not None:
        tensor = tensor.permute(order)
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)
