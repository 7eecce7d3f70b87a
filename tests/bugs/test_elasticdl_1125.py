"""A pull mixed versions."""

import pytest
import torch

from lightning_parallel.server import SSP, Asynchronous
from tests.server_world import World, adding, random_network


@pytest.mark.parametrize("rule", [SSP(3), Asynchronous()], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_pulls_during_pushes_hold_one_version_of_every_shard_and_say_which(rule, seed):
    """Every push adds 1 everywhere, so that a vector of one version has one value, the number of its pushes."""
    world = World(
        adding(size=12, ranges=4, consistency=rule),
        num_servers=4,
        num_workers=4,
        steps=10,
        seconds=lambda worker, step: 0.05,
        network=random_network(seed, mean=0.1),
    ).run()
    reads = [read.result for worker in world.workers for read in worker.reads]
    for result in reads:
        assert torch.equal(result.vector, torch.full((12,), float(result.version)))
        assert set(result.versions) == {result.version} and sum(result.seqs.values()) == result.version
    assert sum(worker.client.blocked for worker in world.workers) > 0  # it did happen that tails disagreed


def test_without_one_version_a_pull_says_which_each_shard_has():
    world = World(
        adding(size=8, ranges=4, consistency=Asynchronous(), one_version=False), 4, 4, 10, lambda worker, step: 0.05,
        random_network(1, mean=0.1),
    ).run()  # fmt: skip
    reads = [read.result for worker in world.workers for read in worker.reads]
    for result in reads:
        assert result.vector.view(4, 2)[:, 0].tolist() == [float(version) for version in result.versions]
    assert any(len(set(result.versions)) > 1 for result in reads)
