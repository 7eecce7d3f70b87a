"""Cross entropy of logits whose vocabulary lies over the ranks, without any rank having all of them.

The one idea: of a row's logits the loss needs their maximum, the sum of their exponentials and the target's own: three
numbers a row go over the axis in place of the vocabulary.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.parallel.axis import TensorAxis


class _CrossEntropy(torch.autograd.Function):
    """Logits [N, V/ranks] and targets [N] to losses [N]; 0 where a target is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, begin: int, ignored: int, axis: TensorAxis) -> Tensor:
        shifted = logits.float()
        shifted = shifted - axis.all_reduce(shifted.amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)
        here = (target >= begin) & (target < begin + logits.shape[-1])
        local = torch.where(here, target - begin, 0)
        own = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        exponentials = shifted.exp()
        own, sums = axis.all_reduce(torch.stack([own, exponentials.sum(-1)])).unbind()
        counted = target != ignored
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(-1)), local, here & counted, counted)
        ctx.dtype = logits.dtype
        return (sums.log() - own).masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counted = ctx.saved_tensors
        result = probabilities.scatter_add(-1, local.unsqueeze(-1), -here.to(probabilities.dtype).unsqueeze(-1))
        return (result * (gradient * counted).unsqueeze(-1)).to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, begin: int, axis: TensorAxis, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which every rank has some columns.

    Args:
        logits: float [N, V/ranks], this rank's columns.
        target: int64 [N], numbers of the whole vocabulary; equal on all ranks.
        begin: number of this rank's first column.
        axis: the ranks.
        ignore_index: a target that does not count.
        reduction: "mean", "sum" or "none".

    Returns:
        float32, a scalar, or [N] with "none"; equal on all ranks.
    """
    losses = _CrossEntropy.apply(logits, target, begin, ignore_index, axis)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()
