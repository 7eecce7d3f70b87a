"""A fused optimizer was taken for one that unscales gradients, and clipping beside it did something else or nothing."""

from typing import Any

import pytest
import torch

from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import SEVERAL, Fit, fit, on_ranks


class Fused(Classifier):
    """AdamW in one kernel."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("strategies", SEVERAL)
def test_as_in_one_process(strategies: Any):
    options = {"max_steps": 4, "gradient_clip_val": 0.1, "use_distributed_sampler": False, "limit_val_batches": 0}
    run = Fit(Fused, options)
    reference = fit(run, "auto", 1)
    for results in on_ranks([(run, make) for make in strategies], 2, timeout=140.0):
        torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
