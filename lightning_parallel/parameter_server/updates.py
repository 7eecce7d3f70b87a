"""What a server does with a push: one small class for each rule, elementwise on a flat range.

The one idea: an update owns the names of its state vectors and a function from (weights, state, gradient, step) to new
weights and state, in place and element by element, so that a range may be cut anywhere. SGD, Adagrad, Adam and AdamW do
torch.optim's arithmetic in its order. Left out: gradients that need a whole layer (LARS, Muon), schedules of the rate
(it comes with the push).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Update:
    """A rule that turns a push into new weights.

    Attributes:
        slots: names of the state vectors, each as long as the range and zero at first.
        additive: a push is simply added, so that a reader may add its own on top of what it read.

    Raises:
        ValueError: a rate, a factor or a penalty is negative or not finite.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            numbers = [n for n in (value if isinstance(value, tuple) else [value]) if isinstance(n, (int, float))]
            if not all(0 <= number < math.inf for number in numbers):
                raise ValueError(f"{type(self).__name__}({name}={value!r}): give a finite number, 0 or more.")

    def names(self) -> tuple[str, ...]:
        """Which of ``slots`` are in use."""
        return self.slots

    def state(self, length: int) -> State:
        """Fresh state of a range."""
        return {slot: torch.zeros(length) for slot in self.names()}

    def apply(self, weights: Tensor, state: State, push: Tensor, step: int, lr: float | None = None) -> None:
        """Change weights and state in place.

        Args:
            weights: shape (n,), float32.
            state: the vectors of ``slots``, each of shape (n,).
            push: shape (n,), float32; not changed.
            step: how many pushes were applied to the range, this one included, >= 1.
            lr: learning rate that came with the push, or None for the rule's own.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class AddDelta(Update):
    """Adds what is pushed: SSP tables, and workers that run an optimizer of their own and push what it changed.

    Example:
        >>> weights = torch.ones(2)
        >>> AddDelta().apply(weights, {}, torch.tensor([1.0, 2.0]), step=1)
        >>> weights
        tensor([2., 3.])
    """

    additive: ClassVar[bool] = True

    def apply(self, weights: Tensor, state: State, push: Tensor, step: int, lr: float | None = None) -> None:
        weights.add_(push)


@dataclass(frozen=True)
class SGD(Update):
    """Stochastic gradient descent as in ``torch.optim.SGD``, on the server.

    Args:
        lr: learning rate.
        momentum: factor of the momentum buffer.
        dampening: 1 minus the factor of the gradient in the buffer.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: look ahead.

    Example:
        >>> weights = torch.ones(1)
        >>> SGD(lr=0.5).apply(weights, {}, torch.ones(1), step=1)
        >>> weights
        tensor([0.5000])
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    slots: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def names(self) -> tuple[str, ...]:
        return self.slots if self.momentum else ()

    def apply(self, weights: Tensor, state: State, push: Tensor, step: int, lr: float | None = None) -> None:
        grad = push.add(weights, alpha=self.weight_decay) if self.weight_decay else push
        if self.momentum:
            buffer = state["momentum_buffer"]
            if step == 1:
                buffer.copy_(grad)
            else:
                buffer.mul_(self.momentum).add_(grad, alpha=1 - self.dampening)
            grad = grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        weights.add_(grad, alpha=-(self.lr if lr is None else lr))


@dataclass(frozen=True)
class Adagrad(Update):
    """A learning rate of its own for every element, kept on the server: Downpour's update.

    ``w -= lr * g / (sqrt(sum of g^2) + eps)``.

    Args:
        lr: learning rate, Downpour's gamma.
        eps: added to the root.
        initial_accumulator_value: where the sums start.

    Source:
        Dean et al., NIPS 2012, section 4.1; arithmetic of ``torch.optim.Adagrad`` with ``lr_decay=0``.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    slots: ClassVar[tuple[str, ...]] = ("sum",)

    def state(self, length: int) -> State:
        return {"sum": torch.full((length,), self.initial_accumulator_value)}

    def apply(self, weights: Tensor, state: State, push: Tensor, step: int, lr: float | None = None) -> None:
        total = state["sum"]
        total.addcmul_(push, push, value=1)
        weights.addcdiv_(push, total.sqrt().add_(self.eps), value=-(self.lr if lr is None else lr))


@dataclass(frozen=True)
class Adam(Update):
    """Adam as in ``torch.optim.Adam``, on the server.

    Args:
        lr: learning rate.
        betas: factors of the two moments.
        eps: added to the root.
        weight_decay: L2 penalty, added to the gradient.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def apply(self, weights: Tensor, state: State, push: Tensor, step: int, lr: float | None = None) -> None:
        rate = self.lr if lr is None else lr
        grad = self._decay(weights, push, rate)
        first, second = self.betas
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        step_size = rate / (1 - first**step)
        root = (state["exp_avg_sq"].sqrt() / (1 - second**step) ** 0.5).add_(self.eps)
        weights.addcdiv_(state["exp_avg"], root, value=-step_size)

    def _decay(self, weights: Tensor, push: Tensor, lr: float) -> Tensor:
        return push.add(weights, alpha=self.weight_decay) if self.weight_decay else push


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as in ``torch.optim.AdamW``, on the server."""

    weight_decay: float = 1e-2

    def _decay(self, weights: Tensor, push: Tensor, lr: float) -> Tensor:
        weights.mul_(1 - lr * self.weight_decay)
        return push
