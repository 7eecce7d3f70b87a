"""Conjugate pairs of operators: what one does to activations, its partner does to their gradients.

    forward                     backward
    copy_to_ranks   copy        all-reduce          before a column-wise product
    sum_over_ranks  all-reduce  copy                behind a row-wise one
    gather_features all-gather  own part            behind a head whose logits everybody needs
    gather_rows     all-gather  reduce-scatter      from slices of the sequence to a column-wise product
    scatter_sums    reduce-scatter  all-gather      from a row-wise product to slices of the sequence
    count_once      copy        the first rank's    where all ranks compute the same of what slices were gathered to
    slice_rows      own part    all-gather          where slices of the sequence begin
    join_slices     all-gather  own part            where they end

The one idea: every rank of the axis runs the same operators in the same order, forwards and backwards, so collectives
meet without another word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parallel.axis import TensorAxis


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.mark_dirty(x)
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherDim(torch.autograd.Function):
    """All-gather along a dim, of which `kept` is wanted; the gradients of all ranks are the same, or are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, kept: int, sums: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.length, ctx.sums = axis, dim, x.shape[dim], sums
        return axis.all_gather(x, dim).narrow(dim, 0, kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, length = ctx.axis, ctx.dim, ctx.length
        if ctx.sums:
            return axis.reduce_scatter(gradient, dim), None, None, None, None
        begin = min(axis.rank * length, gradient.shape[dim])
        own = gradient.narrow(dim, begin, min(length, gradient.shape[dim] - begin))
        if own.shape[dim] < length:
            padding = own.new_zeros([*own.shape[:dim], length - own.shape[dim], *own.shape[dim + 1 :]])
            own = torch.cat([own, padding], dim)
        return own.contiguous(), None, None, None, None


class _SliceDim(torch.autograd.Function):
    """This rank's part along a dim: of what all ranks hold, or of the sum of what they hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, dim: int, sums: bool) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim) if sums else x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_gather(gradient, ctx.dim), None, None, None


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.is_first = axis.rank == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.is_first else torch.zeros_like(gradient), None


def copy_to_ranks(x: Tensor, axis: TensorAxis) -> Tensor:
    """`x` itself; its gradient is the sum of the ranks'. Megatron's f."""
    return _CopyToRanks.apply(x, axis)


def sum_over_ranks(x: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of the ranks' `x`, in place; the gradient goes through. Megatron's g."""
    return _SumOverRanks.apply(x.contiguous(), axis)


def gather_features(x: Tensor, axis: TensorAxis, features: int) -> Tensor:
    """The ranks' `x` [.., k] side by side: [.., features], where the last ranks' `x` may be padded."""
    return _GatherDim.apply(x, axis, x.dim() - 1, features, False)


def gather_rows(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """The ranks' slices [.., k, ..] as a whole; a gradient is the sum of the ranks', of which each gets its slice's."""
    return _GatherDim.apply(x, axis, dim, x.shape[dim] * axis.size, True)


def count_once(x: Tensor, axis: TensorAxis) -> Tensor:
    """`x` itself, with which all ranks compute the same: in a sum of its gradients over the ranks they count once."""
    return _CountOnce.apply(x, axis)


def join_slices(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """The ranks' slices [.., k, ..] as a whole, with which all ranks compute the same."""
    return _GatherDim.apply(x, axis, dim, x.shape[dim] * axis.size, False)


def slice_rows(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's slice of what all ranks hold."""
    return _SliceDim.apply(x, axis, dim, False)


def scatter_sums(x: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's slice of the sum of the ranks' `x`."""
    return _SliceDim.apply(x, axis, dim, True)
