"""A column-wise product whose weight gradient is made while its input's gradient is summed over the ranks.

The one idea: autograd runs a backward's nodes from the last made to the first. So the sum is begun by a node that is
made after the one that multiplies for the weight, and waited for by one that was made before it:

    forward             wait   weight           start   product   meet
    backward, reversed  waits  multiplies       begins  for the   takes what
                        for it for the weight   the sum input     came in

Of several products of one input (query, key and value) the first one's weight gradient is made within the sum; those of
the others are made before it, since their inputs' gradients belong to it.

Left out: backwards that are split (`weight_grad`), which find weights' products by autograd's own nodes; slices of the
sequence; `nn.MultiheadAttention`.

Source: Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_parallel.parallel.axis import Sum, TensorAxis


class _AwaitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coming: Coming) -> Tensor:
        ctx.coming = coming
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.coming.wait()
        return gradient, None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coming: Coming) -> Tensor:
        ctx.coming = coming
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.coming.start(gradient.clone(memory_format=torch.contiguous_format)), None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, product: OverlappedProduct) -> Tensor:
        ctx.product, ctx.dtype = product, weight.dtype
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.product.weight_gradient().to(ctx.dtype), None


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, x: Tensor, product: OverlappedProduct) -> Tensor:
        ctx.product, ctx.token = product, token.dtype
        ctx.save_for_backward(x)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.product.met = (gradient, *ctx.saved_tensors)
        return gradient, gradient.new_zeros((), dtype=ctx.token), None, None


class Coming:
    """The sum of an input's gradients over the axis, in one backward."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._sum: Sum | None = None

    def start(self, gradient: Tensor) -> Tensor:
        """Begin to sum, in place."""
        self._sum = self._axis.begin_all_reduce(gradient)
        return gradient

    def wait(self) -> None:
        """Wait for it."""
        if self._sum is not None:
            self._sum.wait()
        self._sum = None

    def behind(self, x: Tensor) -> Tensor:
        """`x`, whose gradient is waited for."""
        return _AwaitGradient.apply(x, self)

    def in_front(self, x: Tensor) -> Tensor:
        """`x` copied to the ranks."""
        return _Start.apply(x, self)


class OverlappedProduct:
    """One call of a linear module.

    Args:
        module: with this rank's features; its weight is [out, in], or [in, out] in a Conv1D.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.transposed = module, hasattr(module, "nf")
        self.met: tuple[Tensor, Tensor] | None = None  # in a backward: the output's gradient, and the input
        self._token: Tensor | None = None

    def register(self) -> None:
        """Make the node that multiplies for the weight; again does nothing."""
        if self._token is None:
            self._token = _Weight.apply(self.module.weight, self)

    def __call__(self, x: Tensor) -> Tensor:
        """The module's output [.., out]; `x` [.., in] is copied to the ranks."""
        self.register()
        token, self._token = self._token, None
        weight, bias, rows = self.module.weight.detach(), self.module.bias, x.reshape(-1, x.shape[-1])
        y = F.linear(rows, weight.t() if self.transposed else weight, bias)
        return _Meet.apply(y, token, rows.detach(), self).view(*x.shape[:-1], -1)

    def weight_gradient(self) -> Tensor:
        """Of what came in."""
        assert self.met is not None
        gradient, x = self.met[0], self.met[1].to(self.met[0].dtype)
        self.met = None
        return x.t() @ gradient if self.transposed else gradient.t() @ x


def overlaps(module: Any) -> bool:
    """Whether a call of a linear module makes a gradient of its weight."""
    return torch.is_grad_enabled() and bool(module.weight.requires_grad)
