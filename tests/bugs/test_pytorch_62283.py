"""A block returned a transposed or strided view: silent garbage on one backend, an error on the other."""

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class Transposes(nn.Module):
    """[B, T, C] and [B, C, T] in turn, never contiguous; so is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x.transpose(1, 2) if x.shape[1] == WIDTH else x)).transpose(1, 2)


class Strides(nn.Module):
    """Every other column, and a gradient that is expanded from one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[..., ::2]


class Views(Classifier):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(nn.ModuleList(block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].repeat(1, 4, 1)
        for block in self.net:
            x = block(x)
        return x.sum((1, 2), keepdim=True)[..., 0].expand(-1, CLASSES) * torch.arange(CLASSES)


@pytest.mark.parametrize("block", [Transposes, Strides])
def test_views_and_their_gradients_arrive(block: type[nn.Module]):
    assert_parity(Case(lambda: Views(block), row_loader))
