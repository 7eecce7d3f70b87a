"""n workers acted as n times the learning rate."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_parallel.parameter_server import BSP, SGD, SSP, Layout, Rules
from lightning_parallel.strategies import ParameterServerStrategy
from tests.server_world import World
from tests.trainer.pipelines import make_trainer

TARGET = torch.linspace(-1, 1, 6)


def descend(rule, workers: int, scale: str = "mean", steps: int = 5) -> torch.Tensor:
    world = World(Rules(Layout(6, 2), SGD(0.3), rule, scale=scale), 1, workers, steps)
    world.work = lambda worker, result: result.vector - TARGET
    return world.run().weights()


def synchronous(lr: float, steps: int = 5) -> torch.Tensor:
    weights = torch.nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([weights], lr=lr)
    for _ in range(steps):
        weights.grad = weights.detach() - TARGET
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_mean_rule_makes_any_number_of_workers_one_synchronous_one(workers):
    """Every push is divided by the number of workers; with staleness 0 that is synchronous SGD."""
    assert torch.equal(descend(BSP(), workers), synchronous(0.3))


def test_stale_workers_do_not_overshoot_either():
    assert (descend(SSP(2), 4, steps=40) - TARGET).abs().max() < 1e-3


def test_the_sum_rule_is_there_for_those_who_mean_it():
    assert torch.allclose(descend(BSP(), 4, "sum", steps=2), synchronous(1.2, steps=2), atol=1e-6)


class Quadratic(LightningModule):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(6))

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.weights - TARGET).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def train_dataloader(self):
        return DataLoader(range(5))


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_four_workers_under_a_trainer_are_one_or_mean_to_be_four(scale):
    module = Quadratic()
    trainer = make_trainer(ParameterServerStrategy(scale=scale), 4, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module)
    expected = synchronous(0.3 if scale == "mean" else 1.2)
    torch.testing.assert_close(module.weights.detach(), expected, rtol=0.0, atol=1e-6 if scale == "sum" else 0.0)
