"""A parameter-server example hung with three or more ranks."""

import pytest

from lightning_parallel.parameter_server import BSP, SSP
from lightning_parallel.strategies import ParameterServerStrategy
from tests.server_world import World, adding, random_network
from tests.trainer.pipelines import WEIGHTS
from tests.trainer.servers import assert_equal, fit


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", [BSP(), SSP(1)], ids=str)
def test_any_number_of_workers_and_servers_ends(world, rule):
    """As real processes: ``tests/ranks/test_server_processes.py``, worlds of 1 to 4."""
    for servers in (1, 2, 3):
        done = World(adding(consistency=rule), servers, world, 4, network=random_network(world)).run()
        assert done.weights().tolist() == [4.0 * world] * 4


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_workers_under_a_trainer_ends(world):
    """On the same rows they are one process, whatever the number of servers."""
    assert_equal(fit(ParameterServerStrategy(num_servers=2), world)[1], fit("auto")[1], **WEIGHTS)
