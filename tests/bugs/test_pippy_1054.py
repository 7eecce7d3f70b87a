"""A squeeze() in the model met a micro-batch of one row, and shapes went wrong far from it."""

import pytest
import torch
from torch import Tensor, nn

from tests.harness import said_by
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity, on_stages


class Squeezes(nn.Module):
    """[B, 1, C] to [B, C], but [1, 1, C] to [C]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x[:, None]).squeeze())


class SqueezesInStage0(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(Squeezes(), nn.Linear(WIDTH, CLASSES)))


def test_a_micro_batch_of_one_row_ends_with_stage_and_shapes():
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        on_stages(Case(SqueezesInStage0, lambda: row_loader((4,)), validate=False), 2)
    # torch itself finds the label too many in the backward only.
    assert "stage 1 (rank 0) failed in the backward of micro-batch 0\n" in said_by(caught.value)
    assert "(got input: [3], target: [1])" in str(caught.value)


def test_one_row_is_fine_where_the_model_is():
    assert_parity(Case(Classifier, lambda: row_loader((4, 4, 1))))
    assert_parity(Case(SqueezesInStage0, lambda: row_loader((8, 8))), stages=(2,))
