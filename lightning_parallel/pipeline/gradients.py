"""The gradients that a step's backwards make, summed apart from `p.grad`.

The one idea: Lightning zeroes gradients between the forward and `backward`, so what a step makes is kept aside until then.
And since it is kept aside anyway, each micro-batch's gradients are left as autograd made them and added to the sum all
at once (a handful of kernels in place of one a parameter and micro-batch). The price is one more copy of this stage's
gradients while a backward runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class FreshGradients:
    """Sums over the micro-batches of one step.

    Args:
        parameters: this rank's parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For a step: `p.grad` is empty inside, and what it was afterwards."""
        before = [parameter.grad for parameter in self._parameters]
        self._sums = [None] * len(self._parameters)
        self._clear()
        try:
            yield
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def collect(self) -> None:
        """After a micro-batch's backward: add `p.grad` of every parameter to its sum and empty it."""
        into: list[Tensor] = []
        fresh: list[Tensor] = []
        for i, parameter in enumerate(self._parameters):
            gradient, total = parameter.grad, self._sums[i]
            if gradient is None:
                continue
            parameter.grad = None
            if total is None:
                self._sums[i] = gradient
            elif total.layout != torch.strided or gradient.layout != torch.strided:
                self._sums[i] = total + gradient
            else:
                into.append(total)
                fresh.append(gradient)
        if into:
            torch._foreach_add_(into, fresh)

    def take(self) -> dict[nn.Parameter, Tensor]:
        """The sums of the step; they are forgotten here."""
        sums = {p: total for p, total in zip(self._parameters, self._sums, strict=True) if total is not None}
        self._sums = [None] * len(self._parameters)
        return sums

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
