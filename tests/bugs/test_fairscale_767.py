"""Optimizers that couple parameters (a norm over all, LAMB, Prodigy, D-Adaptation) took one shard's sums for all."""

from typing import Any

import pytest
import torch

from lightning_parallel import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from lightning_parallel.zero.optimizer.elementwise import refuse_coupling, refuse_optimizer
from tests.trainer.modules import Classifier
from tests.trainer.optimizers import Early, Lamb, Lookahead, NormedSGD, Polyak, Prodigious, ScheduleFree
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {"max_steps": 3, "use_distributed_sampler": False, "limit_val_batches": 0}
COUPLED = r"its step on one parameter depends on others .* HybridStrategy\(zero_stage=0\) with no other axis than data"


class Normed(Classifier):
    def configure_optimizers(self) -> Any:
        return NormedSGD(self.parameters())


class WarmsUp(Classifier):
    """A schedule has set the learning rate to 0 when the optimizer is looked at."""

    def configure_optimizers(self) -> Any:
        optimizer = NormedSGD(self.parameters())
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n), "interval": "step"}
        ]


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(4))]


@pytest.mark.parametrize("make", [NormedSGD, Prodigious])
def test_sums_over_all_parameters_are_found(make: Any):
    optimizer = make(weights())
    with pytest.raises(ValueError, match=COUPLED):
        refuse_optimizer(optimizer, "ZeROStrategy")
    with pytest.raises(ValueError, match=COUPLED):
        refuse_coupling(optimizer, "PipelineStrategy")
    with pytest.raises(ValueError, match=COUPLED):
        refuse_coupling(Lookahead(optimizer), "PipelineStrategy")


def test_a_step_by_the_loss_is_found():
    with pytest.raises(ValueError, match="its step goes by the loss, of which each rank has that of its own rows"):
        refuse_optimizer(Polyak(weights()), "ZeROStrategy")
    refuse_coupling(Polyak(weights()), "PipelineStrategy")


def test_a_norm_of_each_parameter_is_for_whole_ones():
    with pytest.raises(ValueError, match="its step on a matrix is not that on pieces of the matrix"):
        refuse_optimizer(Lamb(weights()), "ZeROStrategy")
    refuse_coupling(Lamb(weights()), "PipelineStrategy")


class Plain(torch.optim.AdamW):
    """A subclass is another optimizer until it was tried."""


@pytest.mark.parametrize(
    "make", [ScheduleFree, Plain, Early, lambda p: Plain(p, lr=0.0), lambda p: Lookahead(Plain(p))]
)
def test_what_treats_elements_by_themselves_is_let_through(make: Any):
    optimizer = make(weights())
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    refuse_optimizer(optimizer, "ZeROStrategy")
    refuse_coupling(optimizer, "PipelineStrategy")
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not optimizer.state or isinstance(optimizer, Early)


REFUSE = {
    "zero_1": lambda: ZeROStrategy(stage=1),
    "pipeline": lambda: PipelineStrategy(num_microbatches=2),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "hybrid 1": lambda: HybridStrategy(zero_stage=1),
    "tensor": lambda: TensorParallelStrategy(tensor_plan={"net.0": "colwise", "net.2": "rowwise"}),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("zero_3", "hybrid 1", "tensor")]


@pytest.mark.parametrize("make", [Normed, pytest.param(WarmsUp, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["zero_1", "pipeline", *SLOW])
def test_refused_when_training_starts(name: str, make: type[Classifier]):
    with pytest.raises(Exception, match=COUPLED):
        on_ranks([(Fit(make, OPTIONS), REFUSE[name])], 2)


@pytest.mark.slow
def test_servers_know_their_own_optimizers():
    with pytest.raises(Exception, match="The servers know SGD, Adagrad, Adam, AdamW, and this is NormedSGD"):
        on_ranks([(Fit(Normed, OPTIONS), lambda: ParameterServerStrategy(start_method="fork"))], 2)


def test_the_remedy_is_one_process():
    reference = fit(Fit(Normed, OPTIONS), "auto", 1)
    [results] = on_ranks([(Fit(Normed, OPTIONS), lambda: HybridStrategy(zero_stage=0))], 2)
    torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
