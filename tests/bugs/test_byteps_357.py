"""Asynchronous training: one worker's loss differed from the others', and a server crashed."""

import pytest
import torch

from lightning_parallel.callbacks import StalenessMonitor
from lightning_parallel.parameter_server import SGD, SSP, Layout, Rules
from lightning_parallel.strategies import ParameterServerStrategy
from tests.server_world import World, random_network
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.servers import fit


def test_four_workers_one_ten_times_slower_two_hundred_steps():
    staleness, target, gaps, losses = 3, torch.linspace(-1, 1, 6), [], []
    world = World(
        Rules(Layout(6, 2), SGD(0.1), SSP(staleness)),
        num_servers=3,
        num_workers=4,
        steps=50,
        seconds=lambda worker, step: 10.0 if worker == 0 else 1.0,
        network=random_network(0, mean=0.05),
        initial=torch.full((6,), 2.0),
    )

    def work(worker, result):
        clocks = [other.client.clock for other in world.running if other.client.clock is not None]
        gaps.append(worker.client.clock + 1 - min(clocks))
        losses.append(float((result.vector - target).square().sum()))
        return result.vector - target

    world.work = work
    world.run().settle()
    first = [worker.reads[0].result.vector for worker in world.workers]
    assert torch.equal(first[0], torch.full((6,), 2.0)) and max(gaps) <= staleness + 1
    assert losses[-1] < 1e-3 * losses[0]
    assert world.part(0).version == 200 and len(world.live_servers()) == 3


def test_initial_weights_are_equal_whoever_offers_them_first():
    world = World(Rules(Layout(4), SGD(0.0), SSP(1)), 1, 4, 1, network=random_network(3))
    for index, worker in enumerate(world.workers):
        seed = worker.client.seed
        worker.client.seed = lambda vector, seed=seed, index=index: seed(vector + index)
    world.run()
    read = [worker.reads[0].result.vector for worker in world.workers]
    assert all(torch.equal(vector, read[0]) for vector in read)


class Straggles(Classifier):
    """Worker 0 computes every step ten times."""

    def on_train_start(self):
        self.first = [parameter.detach().clone() for parameter in self.parameters()]
        everyone = self.all_gather(torch.cat([parameter.flatten() for parameter in self.first]))
        assert all(torch.equal(other, everyone[0]) for other in everyone)

    def training_step(self, batch, batch_idx):
        for _ in range(9 if self.global_rank == 0 else 0):
            self.loss(batch).backward(inputs=[self.net[0].weight])
            self.zero_grad()
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_four_workers_under_a_trainer_one_ten_times_slower():
    monitor, shares = StalenessMonitor(), row_loader((8,) * 25)
    trainer, module = fit(
        ParameterServerStrategy("ssp", 3, num_servers=3),
        4,
        Straggles,
        shares,
        row_loader((8,)),
        [monitor],
        max_epochs=2,
    )
    found = trainer.callback_metrics
    assert sum(monitor.reading.all.ages.values()) == 200
    assert found["parallel/staleness_gap_max"] <= 3
    torch.manual_seed(1)
    before, after = (sum(of.loss(batch).item() for batch in shares) for of in (Classifier(), module))
    assert after < before
