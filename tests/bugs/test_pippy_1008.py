"""The output of stage 0 was used in stage 2 of 3: the value was lost, or its gradient counted twice."""

import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity, failure_of


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, first: Tensor | None = None) -> Tensor:
        return torch.tanh(self.layer(h)) + (0 if first is None else first)


class Skips(Classifier):
    """The first block's output goes to the third beside the second's."""

    through = True

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Two() for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.net[0](x)
        second = self.net[1](first * 1, first if self.through else None)
        return self.head(self.net[2](second, first))


class SkipsUnseen(Skips):
    through = False


def test_the_gradient_is_the_sum_of_both_paths():
    assert_parity(Case(Skips, row_loader), stages=(2, 3))


def test_a_stage_that_does_not_see_the_value_is_named():
    message = failure_of(Case(SkipsUnseen, row_loader, validate=False), 3)
    assert (
        "Block `net.2` of stage 2 needs a value computed from the output of `net.0` (stage 0), which stage 1 does"
        in message
    )
