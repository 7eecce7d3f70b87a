"""An in-place ReLU on the received tensor: no gradient reached the stage before, and there was no error."""

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class InPlace(Classifier):
    recompute = False

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
        super().__init__(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = (
                checkpoint(layer, x, use_reentrant=False)
                if self.recompute and isinstance(layer, nn.Linear)
                else layer(x)
            )
        return x


class InPlaceBlock(nn.Module):
    """Block that begins in place, and is recomputed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.layer = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.relu(x * 1.0))


class Recomputed(InPlace):
    recompute = True


class RecomputedBlocks(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(InPlaceBlock() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("make_module", [InPlace, Recomputed])
def test_gradients_reach_the_stage_before(make_module):
    case = Case(make_module, row_loader, {"partition": [1, 4]})
    [record] = assert_parity(case, stages=(2,))
    assert not record.weights["net.0.weight"].equal(record.initial["net.0.weight"])
    assert_parity(case.but({"partition": [1, 2, 2]}), stages=(3,))


def test_blocks_that_begin_in_place_are_recomputed():
    assert_parity(Case(RecomputedBlocks, row_loader))
