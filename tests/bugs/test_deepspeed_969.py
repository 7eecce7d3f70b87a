"""The third entry of a tuple between stages vanished, and a boolean mask arrived as numbers."""

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class Passes(nn.Module):
    """Takes h and up to four more values, uses all and hands all on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor | None = None, *more: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.layer(h))
        if mask is None:
            return (h,)
        assert mask.dtype == torch.bool
        for value in more:
            h = h + value * 0.1
        return h.masked_fill(mask, 0.0), mask, *more


class Tuples(Classifier):
    def __init__(self, arity: int) -> None:
        super().__init__(None)
        self.arity, self.net = arity, None
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Passes() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        values = (h, h > 0.5, h * 2, h[:, :1], h.detach()[0, 0] * 0 + 0.5)[: self.arity]
        for block in self.blocks:
            values = block(*values)
        return self.head(values[0])


@pytest.mark.parametrize("arity", [1, 2, 3, 4, 5])
def test_every_entry_arrives(arity: int):
    assert_parity(Case(lambda: Tuples(arity), row_loader), stages=(3,))
