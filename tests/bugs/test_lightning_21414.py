"""Averages of weights need the model, and a rank held a part of it that is not like the others'."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, callbacks

from tests.trainer.modules import Classifier, chain, row_dataset
from tests.trainer.pipelines import WEIGHTS
from tests.trainer.zeros import STAGES, Fit, fit, on_ranks, others, zero

if not hasattr(callbacks, "EMAWeightAveraging"):
    pytest.skip("Lightning averages weights from version 2.6 on", allow_module_level=True)


class Odd(Classifier):
    """Five rows and less on three ranks."""

    def __init__(self) -> None:
        super().__init__(chain(3, width=6))
        self.net[2] = torch.nn.Linear(6, 5)
        self.net[4] = torch.nn.Linear(5, 3)


def weights(trainer: Any, module: LightningModule) -> Any:
    return {name: value.clone() for name, value in module.state_dict().items()}


# A copy of the model is not DeepSpeed's, whose stage 3 refuses it in words.
OWN = pytest.param([zero(stage) for stage in STAGES], id="own")


@pytest.mark.parametrize("strategies", [OWN, others("fsdp2", [2]), others("deepspeed", [1, 2])])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_average_is_one_processs(ranks: int, strategies: Any):
    options = {
        "max_steps": 4,
        "use_distributed_sampler": False,
        "callbacks": lambda: [callbacks.EMAWeightAveraging(decay=0.5)],
    }
    run = Fit(Odd, options, lambda: row_dataset(20, 5), after=weights)
    reference = fit(run, "auto", 1)
    for results in on_ranks([(run, make) for make in strategies], ranks, timeout=140.0):
        for result in results:
            torch.testing.assert_close(result.extra, reference.extra, **WEIGHTS)
