"""Normalise several pieces of a batch, on one rank or on many, with the statistics of all of it.

The one idea: mean and variance of a batch follow from the count, the sum and the sum of squares of its pieces, and
so do the two sums that every gradient needs. So pieces are told nothing but these sums; over ranks they are added up.
Left out: second derivatives.
Source: Ioffe and Szegedy, Batch Normalization, arXiv 1502.03167, section 3 (the gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AddUp = Callable[[Tensor], None]  # sums a vector over ranks, in place


@dataclass(frozen=True)
class BatchStatistics:
    """Of a whole batch: mean and variance (biased) are float64 vectors of a number a channel.

    Attributes:
        count: values per channel, a number on the device.
        here: values per channel in this rank's pieces.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    here: int

    @classmethod
    def of(cls, pieces: Sequence[Tensor], add_up: AddUp | None = None) -> BatchStatistics:
        """The statistics of pieces [rows, channels, ...], and of other ranks' where `add_up` sums over ranks."""
        channels = pieces[0].size(1)
        packed, here = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=pieces[0].device), 0
        for x in pieces:
            count = x.numel() // channels
            if count:
                variance, mean = torch.var_mean(_exact(x), _dims(x), correction=0)
                variance, mean = variance.double(), mean.double()
                packed += torch.cat([mean.new_ones(1), mean, variance + mean.pow(2)]) * count
                here += count
        if add_up is not None:
            add_up(packed)
        mean, squares = (packed[1:] / packed[0].clamp_min(1)).chunk(2)
        return cls(packed[0], mean, (squares - mean.pow(2)).clamp_min(0), here)

    @torch.no_grad()
    def update(self, module: nn.modules.batchnorm._BatchNorm) -> None:
        """One step of a norm's running statistics, as `F.batch_norm` takes it for the whole batch."""
        if not module.track_running_stats or module.running_mean is None or module.running_var is None:
            return
        assert module.num_batches_tracked is not None
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        unbiased = self.variance * (self.count / (self.count - 1).clamp_min(1))
        module.running_mean.lerp_(self.mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)

    def normalised(self, x: Tensor, eps: float) -> Tensor:
        """A piece by these statistics, in 32 bits at least."""
        x = _exact(x)
        return (x - _wide(self.mean, x)) * _wide(self._inverse(eps), x)

    def _inverse(self, eps: float) -> Tensor:
        return (self.variance + eps).rsqrt()


def normalise(
    pieces: Sequence[Tensor],
    statistics: BatchStatistics,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add_up: AddUp | None = None,
) -> list[Tensor]:
    """Pieces of a batch by the statistics of all of it; gradients know that these follow from every piece.

    Args:
        pieces: each [rows, channels, ...].
        statistics: theirs, and of other ranks' with the same `add_up`.
        weight, bias: of a channel each, or None.
        eps: added to the variance.
        add_up: see `BatchStatistics.of`; in the backward every rank calls it once for every call of this.

    Returns:
        Tensors of the pieces' shapes and dtypes.

    Example:
        >>> a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]])
        >>> [part.shape for part in normalise([a, b], BatchStatistics.of([a, b]), None, None, 1e-5)]
        [torch.Size([2, 1]), torch.Size([1, 1])]
    """
    return list(_Normalise.apply(statistics, eps, add_up, weight, bias, *pieces))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        statistics: BatchStatistics,
        eps: float,
        add_up: AddUp | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *pieces: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.statistics, ctx.eps, ctx.add_up = statistics, eps, add_up
        ctx.bias = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *pieces)
        return tuple(scaled(statistics.normalised(x, eps), weight, bias).to(x.dtype) for x in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        weight, *pieces = ctx.saved_tensors
        statistics: BatchStatistics = ctx.statistics
        towards = [_exact(gradient) for gradient in gradients]
        normal = [statistics.normalised(x, ctx.eps) for x in pieces]
        of_bias = sum(g.sum(_dims(g)) for g in towards)
        of_weight = sum((g * n).sum(_dims(g)) for g, n in zip(towards, normal, strict=True))
        assert isinstance(of_bias, Tensor) and isinstance(of_weight, Tensor)
        sums = torch.cat([of_bias, of_weight]).double()
        if ctx.add_up is not None:
            ctx.add_up(sums)
        mean, along = (sums / statistics.count).chunk(2)
        scale = statistics._inverse(ctx.eps)
        if weight is not None:
            scale = scale * weight
        through = [
            ((g - _wide(mean, g) - n * _wide(along, g)) * _wide(scale, g)).to(x.dtype)
            for g, n, x in zip(towards, normal, pieces, strict=True)
        ]
        return (
            None, None, None, None if weight is None else of_weight.to(weight.dtype),
            None if ctx.bias is None else of_bias.to(ctx.bias), *through,
        )  # fmt: skip


def scaled(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What is normalised, times the weight and with the bias of its channel."""
    if weight is not None:
        normal = normal * _wide(weight, normal)
    return normal if bias is None else normal + _wide(bias, normal)


class SynchronisedBatchNorm(nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` that runs where torch's runs on GPUs alone."""

    def forward(self, input: Tensor) -> Tensor:
        """[rows, channels, ...] normalised by the statistics of all ranks' rows."""
        if input.device.type != "cpu" or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)

        def add_up(sums: Tensor) -> None:
            dist.all_reduce(sums, group=self.process_group)

        statistics = BatchStatistics.of([input.detach()], add_up)
        refuse_one_value(statistics, input)
        statistics.update(self)
        return normalise([input], statistics, self.weight, self.bias, self.eps, add_up)[0]


def refuse_one_value(statistics: BatchStatistics, x: Tensor) -> None:
    """Raise as torch does.

    Raises:
        ValueError: the batch has one value a channel.
    """
    if statistics.here <= 1 and int(statistics.count) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(of_channels: Tensor, x: Tensor) -> Tensor:
    """Values of channels, for every entry of a piece."""
    return of_channels.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))
