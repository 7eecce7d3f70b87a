"""The gradients that a step's backwards make, kept apart from those that accumulate.

The one idea: Lightning zeroes gradients between the forward and `backward`, so what a step makes is kept aside until
then. Gradients that are going to be zeroed anyway are dropped when the step begins, which saves a copy while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


class FreshGradients:
    """What the backwards of one step add up, by parameter.

    Args:
        parameters: this rank's parameters.
        is_lent: whether a parameter's gradient lies in memory that the next step writes to.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], is_lent: Callable[[nn.Parameter], bool] = lambda parameter: False
    ) -> None:
        self._parameters, self._is_lent = list(parameters), is_lent
        self._fresh: list[Tensor | None] = []
        self._before: dict[nn.Parameter, Tensor | None] = {}

    @contextmanager
    def aside(self, keep: bool) -> Iterator[None]:
        """For a step: `p.grad` is empty at first inside, and afterwards what it was (if it is to be kept)."""
        self._before = {parameter: self._kept(parameter) for parameter in self._parameters} if keep else {}
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            self._fresh = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = self.before(parameter)
            self._before = {}

    def before(self, parameter: nn.Parameter) -> Tensor | None:
        """Within a step: the gradient to which `backward` adds what the step makes."""
        return self._before.get(parameter)

    def _kept(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad.clone() if parameter.grad is not None and self._is_lent(parameter) else parameter.grad

    def take(self) -> dict[nn.Parameter, Tensor | None]:
        """The gradients of the last step; they are forgotten here."""
        fresh, self._fresh = dict(zip(self._parameters, self._fresh, strict=True)), []
        return fresh
