"""Losses differed from stage to stage, the more with accumulation, where weights are shared and branches vary."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, ddp, on_ranks, zero


class Shared(Classifier):
    """One linear layer is used twice; another in every other batch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))
        self.extra, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.net(torch.tanh(self.net(x))))
        return self.head(self.extra(x) if self.batches % 2 else x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches = batch_idx
        return super().training_step(batch, batch_idx)


def test_every_stage_is_ddp():
    accumulated = Fit(Shared, {"max_epochs": 1, "accumulate_grad_batches": 2})
    plain = Fit(Shared, {"max_epochs": 1})
    peer = ddp(find_unused_parameters=True)
    theirs, one, two, three = on_ranks([(accumulated, make) for make in (peer, zero(1), zero(2), zero(3))], 2)
    for ours, bits in ((one, True), (two, False), (three, False)):  # 2 and 3 reduce, then add
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.losses, other.losses, **({"rtol": 0, "atol": 0} if bits else LOSS))
        torch.testing.assert_close(ours[0].weights, theirs[0].weights, **WEIGHTS)
    theirs, one, two = on_ranks([(plain, make) for make in (peer, zero(1), zero(2))], 2)
    for ours in (one, two):
        torch.testing.assert_close(ours[0].weights, theirs[0].weights, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_says_what_it_would_move_without_a_gradient(stage: int):
    """Every step that uses all layers is DDP's; the first that does not ends in words."""
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 4, "limit_val_batches": 0}
    whole = Fit(Shared, {"max_epochs": 1, **options})
    jobs = [(whole, ddp(find_unused_parameters=True)), (whole, zero(stage, engine="deepspeed"))]
    theirs, ours = on_ranks(jobs, 2, timeout=95.0)
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, **WEIGHTS)
    plain = Fit(Shared, {"max_epochs": 1, "limit_val_batches": 0})
    with pytest.raises(Exception, match=r"no rank made a gradient for `extra\.weight`, `extra\.bias` in this step\."):
        on_ranks([(plain, zero(stage, engine="deepspeed"))], 2, timeout=95.0)
