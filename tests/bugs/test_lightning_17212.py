"""A rank skipped a branch and all waited for ever (20138: layers that some batches do not use)."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, Classifier
from tests.trainer.pipelines import LOSS
from tests.trainer.zeros import Fit, on_ranks, zero


class Branches(Classifier):
    """Rank `batch_idx % 2` goes a longer way."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.longer = self.global_rank == batch_idx % 2
        return self.loss(batch)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return self.extra(x) if self.trainer.training and self.longer else x


class Both(Branches):
    """What it is in one process: the mean of both ways, which ranks go with the same rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for self.longer in (True, False):
            losses.append(self.loss(batch))
        return sum(losses) / 2


@pytest.mark.parametrize("stage", [1, 2])
def test_absent_gradients_count_as_zero(stage: int):
    options = {"max_epochs": 1, "use_distributed_sampler": False}
    ours, reference = on_ranks([(Fit(Branches, options), zero(stage)), (Fit(Both, options), zero(stage))], 2)
    torch.testing.assert_close(ours[0].weights, reference[0].weights, **LOSS)
    both = torch.stack([ours[0].losses, ours[1].losses]).mean(0)
    torch.testing.assert_close(both, reference[0].losses, **LOSS)
