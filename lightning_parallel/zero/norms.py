"""Norms of tensors whose elements are divided among ranks: each takes that of its part, and they are joined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def joined_norm(
    sharded: Sequence[Tensor], whole: Sequence[Tensor], order: float, group: Any, device: torch.device
) -> Tensor:
    """The norm of this rank's parts of sharded tensors and the others' parts, and of whole ones, on a device."""
    parts = [_norm_of_parts([p for p in parts if p.numel()], order, device) for parts in (sharded, whole)]
    if sharded:  # the same on all ranks, though a part may be empty
        parts[0] = join_norms(parts[0], order, group)
    return torch.linalg.vector_norm(torch.stack(parts), order)


def _norm_of_parts(parts: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), device=device)
    real = [part.detach().abs() if part.is_complex() else part.detach() for part in parts]
    dtype = reduce(torch.promote_types, {part.dtype for part in real}, torch.float32)
    norms = torch._foreach_norm(real, order, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms), order).to(device)


def join_norms(norm: Tensor, order: float, group: Any) -> Tensor:
    """The norm over all ranks, of each rank's own."""
    if order == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    joined = norm**order
    dist.all_reduce(joined, group=group)
    return joined ** (1 / order)
