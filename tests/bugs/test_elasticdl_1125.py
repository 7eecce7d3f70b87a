"""A pull mixed versions."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_parallel.parameter_server import SSP, Asynchronous
from lightning_parallel.strategies import ParameterServerStrategy
from tests.server_world import World, adding, random_network
from tests.trainer.pipelines import make_trainer


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


class Counts(LightningModule):
    """Every step of every worker adds 1 to all weights, so that weights of one version are alike."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(5)) for _ in range(4))

    def training_step(self, batch, batch_idx):
        values = torch.cat([part.detach() for part in self.parts])
        assert (values == values[0]).all() and values[0] >= self.global_step
        return -sum(part.sum() for part in self.parts)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader(range(30))


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["ssp", "async"])
def test_under_a_trainer_every_worker_reads_one_version_of_all_weights(consistency):
    module = Counts()
    strategy = ParameterServerStrategy(consistency, num_servers=3, scale="sum")
    make_trainer(strategy, 3, max_epochs=1, use_distributed_sampler=False).fit(module)
    assert all((part == 90).all() for part in module.parts)
