"""A lone peer ran with zero gradients."""

import pytest
import torch

from lightning_parallel.parameter_server import (
    BSP,
    ESSP,
    SGD,
    SSP,
    Asynchronous,
    BoundedDelay,
    DropOlderThan,
    Layout,
    Rules,
)
from lightning_parallel.strategies import ParameterServerStrategy
from tests.server_world import World
from tests.trainer.servers import assert_equal, fit


@pytest.mark.parametrize("rule", [BSP(), SSP(3), ESSP(2), BoundedDelay(0), Asynchronous(), DropOlderThan(0)], ids=str)
def test_one_worker_equals_plain_descent(rule):
    target = torch.linspace(-1, 1, 5)
    world = World(Rules(Layout(5, 2), SGD(0.2, momentum=0.5), rule), 2, 1, 6)
    world.work = lambda worker, result: result.vector - target
    weights = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([weights], lr=0.2, momentum=0.5)
    for _ in range(6):
        weights.grad = weights.detach() - target
        optimizer.step()
    assert torch.equal(world.run().weights(), weights.detach())


@pytest.mark.slow
def test_one_worker_under_a_trainer_equals_plain_descent():
    """In every mode: ``tests/trainer/test_parameter_server.py``; here with the defaults of the string ``ssp``."""
    assert_equal(fit(ParameterServerStrategy("ssp"), 1)[1], fit("auto")[1])
