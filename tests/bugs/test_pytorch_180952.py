"""A module or a weight used twice inside a stage raised, or doubled its gradient."""

import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class TwiceInside(nn.Module):
    """One weight in two products, one norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.eye(WIDTH) + 0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x) @ self.weight @ self.weight)


class Twice(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(TwiceInside() for _ in range(4)), nn.Linear(WIDTH, CLASSES)))


def test_gradients_are_autograds():
    assert_parity(Case(Twice, row_loader))
