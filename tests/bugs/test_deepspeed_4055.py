"""A first layer that does not train crashed stage 2: its bucket waited for gradients that never came."""

from typing import Any

import pytest
import torch

from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import SEVERAL, Fit, fit, on_ranks


class FrozenFirst(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


OPTIONS: dict[str, Any] = {"max_steps": 3, "use_distributed_sampler": False, "limit_val_batches": 0}


@pytest.mark.parametrize("strategies", SEVERAL)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_trains_as_in_one_process(accumulate: int, strategies: Any):
    run = Fit(FrozenFirst, {**OPTIONS, "accumulate_grad_batches": accumulate})
    reference = fit(run, "auto", 1)
    for results in on_ranks([(run, make) for make in strategies], 2, timeout=140.0):
        torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
