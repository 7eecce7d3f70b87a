"""Updates against torch.optim, and a whole job against one process: bit for bit where the order is the same."""

import pytest
import torch

from lightning_parallel.parameter_server import BSP, SGD, SSP, Adagrad, Adam, AdamW, Layout, Rules, flatten, unflatten
from tests.server_world import World, random_network

PAIRS = {
    "sgd": (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (SGD(0.1, 0.9, weight_decay=0.01), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (SGD(0.1, 0.9, nesterov=True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": (SGD(0.1, 0.9, 0.2), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "adagrad": (Adagrad(0.1), torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (Adam(0.01), torch.optim.Adam, {"lr": 0.01}),
    "adam decay": (Adam(0.01, weight_decay=0.1), torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (AdamW(0.01, (0.8, 0.95)), torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95)}),
}


def network(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


class Trainer:
    """A model whose weights are what was read, and a batch for each (worker, step)."""

    def __init__(self) -> None:
        self.model = network()
        self.parameters = list(self.model.parameters())
        self.vector = flatten(self.parameters, self.parameters)

    def gradient(self, vector: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        unflatten(vector, self.parameters)
        self.model.zero_grad()
        self.loss(worker, step).backward()
        return flatten([p.grad for p in self.parameters], self.parameters)

    def loss(self, worker: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * worker + step)
        return self.model(torch.randn(6, 5, generator=generator)).square().mean()


def train(rules: Rules, trainer: Trainer, workers: int, steps: int, **options) -> World:
    world = World(rules, num_workers=workers, steps=steps, initial=trainer.vector, **options)
    world.work = lambda worker, result: trainer.gradient(result.vector, world.workers.index(worker), worker.done)
    return world.run()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("ranges", [1, 7])
def test_one_worker_equals_torch_optim_bit_for_bit(name, ranges):
    update, optimizer_class, options = PAIRS[name]
    trainer, reference = Trainer(), Trainer()
    rules = Rules(Layout(trainer.vector.numel(), ranges), update, SSP(2))
    world = train(rules, trainer, workers=1, steps=6, num_servers=3, network=random_network(0))
    optimizer = optimizer_class(reference.parameters, foreach=False, **options)
    for step in range(6):
        optimizer.zero_grad()
        reference.loss(0, step + 1).backward()
        optimizer.step()
    assert torch.equal(world.weights(), flatten(reference.parameters, reference.parameters))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_bsp_equals_synchronous_descent_on_the_mean_gradient_bit_for_bit(name):
    update, optimizer_class, options = PAIRS[name]
    trainer, reference = Trainer(), Trainer()
    rules = Rules(Layout(trainer.vector.numel(), 3), update, BSP())
    world = train(rules, trainer, workers=4, steps=5, num_servers=2, network=random_network(3))
    optimizer = optimizer_class(reference.parameters, foreach=False, **options)
    order = sorted(world.workers, key=lambda worker: worker.client.worker)
    for step in range(5):
        vector = flatten(reference.parameters, reference.parameters)
        grads = [reference.gradient(vector, world.workers.index(worker), step + 1) for worker in order]
        mean = ((grads[0] + grads[1] + grads[2]) + grads[3]) / 4
        unflatten(mean, [parameter.grad for parameter in reference.parameters])
        optimizer.step()
    assert torch.equal(world.weights(), flatten(reference.parameters, reference.parameters))


def test_a_rate_that_comes_with_the_push_counts():
    weights = torch.ones(3)
    SGD(lr=0.5).apply(weights, {}, torch.ones(3), step=1, lr=0.25)
    assert weights.tolist() == [0.75] * 3


def test_every_replica_is_equal_bit_for_bit():
    trainer = Trainer()
    rules = Rules(Layout(trainer.vector.numel(), 2), Adam(0.01), SSP(1), aggregate=3, flush_after=0.5)
    world = train(rules, trainer, workers=3, steps=8, num_servers=3, network=random_network(5)).settle()
    assert [len(chain) for chain in world.manager.view.chains.values()] == [3, 3]
    assert torch.equal(world.weights(0), world.weights(1)) and torch.equal(world.weights(0), world.weights(2))
    assert world.part(0).state.keys() == {"exp_avg", "exp_avg_sq"}
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(world.part(0, 0).state[slot], world.part(0, 2).state[slot])


def test_one_update_of_several_pushes_divides_the_messages_down_the_chain():
    def appended(aggregate: int) -> int:
        trainer = Trainer()
        rules = Rules(
            Layout(trainer.vector.numel()), SGD(0.1), SSP(4), aggregate=aggregate, flush_after=2.5, replicas=3
        )
        world = train(rules, trainer, workers=4, steps=8, num_servers=3)
        assert world.part(0).version == 32
        return world.part(0).lsn

    assert appended(1) > 32 >= 4 * (appended(4) - 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adagrad(lr=-1.0), r"Adagrad\(lr=-1.0\): give a finite number, 0 or more"),
        (lambda: SGD(lr=float("nan")), r"SGD\(lr=nan\)"),
        (lambda: Adam(betas=(0.9, float("inf"))), r"Adam\(betas=\(0.9, inf\)\)"),
    ],
)
def test_rates_that_no_update_has(make, words):
    with pytest.raises(ValueError, match=words):
        make()
