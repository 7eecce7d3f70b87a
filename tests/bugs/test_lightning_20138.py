"""Layers that some batches do not use made a run fail or wait; here no gradient is no step, and all ranks know it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import SEVERAL, Fit, fit, on_ranks


class Conditional(Classifier):
    """The second layer is used by every other batch; with weight decay and moments a gradient of zero would show."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.odd = nn.Linear(CLASSES, CLASSES), False

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.net(x)) if self.odd else self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.odd = batch_idx % 2 == 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.2)


@pytest.mark.parametrize("strategies", SEVERAL)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_as_in_one_process(accumulate: int, strategies: Any):
    options = {
        "max_steps": 4, "accumulate_grad_batches": accumulate, "use_distributed_sampler": False, "limit_val_batches": 0,
        "max_epochs": 2,
    }  # fmt: skip
    run = Fit(Conditional, options)
    reference = fit(run, "auto", 1)
    for results in on_ranks([(run, make) for make in strategies], 2, timeout=140.0):
        torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
