"""n workers acted as n times the learning rate."""

import pytest
import torch

from lightning_parallel.server import BSP, SGD, SSP, Layout, Rules
from tests.server_world import World

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
