"""What came in for one run of a stage: values as the step may use them, and the gradients that it left.

The one idea: everything that came in, from whatever stage, is what one autograd node gives out. So the backward stops
there, and each stage that sent something gets its gradients from one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.stage.contract import Contract
from lightning_parallel.pipeline.stage.stage_values import Place

_ANCHOR = torch.empty(0, requires_grad=True)  # what makes the outputs of `_Receive` require a gradient


@dataclass
class ReceivedValues:
    """Received values as a step may use them, and the gradients it left."""

    values: dict[Place, Tensor]
    carrying: tuple[Place, ...] = ()
    gradients: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, received: Sequence[tuple[Contract, Sequence[Tensor]]], grad: bool) -> ReceivedValues:
        """Values that carry a gradient become outputs of one autograd node: a block may even write into them."""
        inbox = cls({})
        for contract, tensors in received:
            places = contract.travelling()
            inbox.values.update(zip(places, tensors, strict=True))
            inbox.carrying += tuple(place for place in places if grad and contract.values[place][1])
        if inbox.carrying:
            carrying = [inbox.values[place] for place in inbox.carrying]
            inbox.values.update(zip(inbox.carrying, _Receive.apply(_ANCHOR, inbox.gradients, carrying), strict=True))
        return inbox

    def take_gradients(self, contract: Contract) -> list[Tensor]:
        """Gradients of the values that carry one, zeros where the step did not use a value."""
        positions = contract.with_gradient()
        if not self.gradients:
            return [torch.zeros_like(self.values[position], requires_grad=False) for position in positions]
        of = dict(zip(self.carrying, self.gradients, strict=True))
        return [of[position] for position in positions]


class _Receive(torch.autograd.Function):
    """Gives received tensors a place in the graph; its backward keeps their gradients.

    It holds a list for them and not the inbox, whose values hold the node: nobody would find that circle, which leads
    through C++.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, left: list[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.left = left
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.left[:] = gradients
        return None, None, None
