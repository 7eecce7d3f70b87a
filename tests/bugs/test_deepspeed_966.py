"""Losses differed from stage to stage, the more with accumulation, where weights are shared and branches vary."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import STAGES, Fit, ddp, on_ranks, others, zero


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


@pytest.mark.parametrize("strategies", [others("fsdp2", [2, 3]), others("deepspeed", STAGES)])
def test_every_engine_is_ddp(strategies: Any):
    """With and without accumulation; in the latter every other step leaves a layer alone."""
    peer = ddp(find_unused_parameters=True)
    for accumulated in (1, 2):
        run = Fit(Shared, {"max_epochs": 1, "accumulate_grad_batches": accumulated})
        theirs, *all_of_ours = on_ranks([(run, make) for make in (peer, *strategies)], 2, timeout=70.0)
        for ours in all_of_ours:
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine.losses, other.losses, **LOSS)
            torch.testing.assert_close(ours[0].weights, theirs[0].weights, **WEIGHTS)
