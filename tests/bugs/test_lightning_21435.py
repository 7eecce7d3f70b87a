"""A fused optimizer was taken for one that unscales gradients, and clipping beside it did something else or nothing."""

from typing import Any

import torch

from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import STAGES, Fit, fit, on_ranks, zero


class Fused(Classifier):
    """AdamW in one kernel."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def test_as_in_one_process():
    options = {"max_steps": 4, "gradient_clip_val": 0.1, "use_distributed_sampler": False, "limit_val_batches": 0}
    run = Fit(Fused, options)
    reference = fit(run, "auto", 1)
    for results in on_ranks([(run, zero(stage)) for stage in STAGES], 2):
        torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
