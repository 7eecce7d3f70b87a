"""`self.all_gather(x, sync_grads=True)` has one process's gradient, or is refused; no part is dropped unsaid."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel import HybridStrategy, ParameterServerStrategy, ZeROStrategy
from tests.trainer.modules import Classifier
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, ddp, on_ranks

pytestmark = pytest.mark.filterwarnings(r"ignore:torch\.distributed\.nn\.functional:FutureWarning")  # DDP's
OPTIONS: dict[str, Any] = {"max_steps": 3, "limit_val_batches": 0}


class Contrasts(Classifier):
    """A loss over the rows of all ranks."""

    sync_grads = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        everyone = self.all_gather(z, sync_grads=self.sync_grads).reshape(-1, z.shape[1])
        return self.loss(batch) + (z @ everyone.T).square().mean()


class WithoutGradients(Contrasts):
    sync_grads = False


class Evaluates(Classifier):
    """Nothing needs a gradient there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[0], sync_grads=True)
        return self.loss(batch)


def servers() -> Any:
    return ParameterServerStrategy(start_method="fork")


def test_servers_refuse_it():
    words = r"all_gather\(sync_grads=True\) would have no gradient.* Use ZeROStrategy\(stage=1\).* sync_grads=False"
    with pytest.raises(Exception, match=words):
        on_ranks([(Fit(Contrasts, OPTIONS), servers)], 2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [WithoutGradients, Evaluates])
def test_servers_gather_what_needs_none(make: type[Classifier]):
    theirs, ours = on_ranks([(Fit(make, OPTIONS), ddp()), (Fit(make, OPTIONS), servers)], 2)
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, **WEIGHTS)


@pytest.mark.parametrize("make", [
    lambda: ZeROStrategy(stage=1), pytest.param(lambda: ZeROStrategy(stage=3), marks=pytest.mark.slow),
    pytest.param(lambda: HybridStrategy(zero_stage=2), marks=pytest.mark.slow),
])  # fmt: skip
def test_others_have_the_gradient_of_ddp(make: Any):
    theirs, ours = on_ranks([(Fit(Contrasts, OPTIONS), ddp()), (Fit(Contrasts, OPTIONS), make)], 2)
    torch.testing.assert_close(ours[0].losses, theirs[0].losses, **LOSS)
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, **WEIGHTS)
