"""Messages that cannot be, or are in the name of who may not say them: no machine of a job raises, sums stay exact."""

import random
import types
import typing
from dataclasses import fields, is_dataclass

import pytest
import torch

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.filters.codec import fits
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.wire import BODIES
from tests.server_world import World, adding

NUMBERS = (0, 1, 2, 3, -1, 7, 1 << 20, (1 << 62) - 1, -(1 << 62))
TEXTS = (
    "",
    "fp16",
    "fp16+sparse",
    "int8+cached",
    "server",
    "worker",
    "x",
    "lsn",
    "weights",
    "add",
    "gap",
    "keys",
    "a/b",
)
DTYPES = (torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.bfloat16)
FORGED = tuple(body for body in BODIES if body is not m.Leave)  # who leaves may say so


class Forger:
    """Makes values of any type that a message may hold."""

    def __init__(self, seed: int, addresses: list[str]) -> None:
        self.rng, self.addresses = random.Random(seed), addresses

    def message(self, source: str, target: str, view: int) -> m.Message:
        number = self.rng.choice((view, view, view, view + 1, 0, 1 << 60))
        return m.Message(source, target, number, self.value(self.rng.choice(FORGED)))

    def value(self, hint):
        origin, args, rng = typing.get_origin(hint), typing.get_args(hint), self.rng
        if hint is typing.Any:
            return rng.choice((None, True, 1, 0.5, "x", "dot"))
        if origin in (typing.Union, types.UnionType):
            return None if (one := rng.choice(args)) is type(None) else self.value(one)
        if origin is tuple:
            kinds = [args[0]] * rng.randrange(3) if args[-1] is Ellipsis else args
            return tuple(self.value(kind) for kind in kinds)
        if origin is dict:
            return {self.value(args[0]): self.value(args[1]) for _ in range(rng.randrange(3))}
        if hint is torch.Tensor:
            return torch.ones(rng.choice((0, 1, 2, 3, 4)), dtype=rng.choice(DTYPES))
        if is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            return hint(*(self.value(hints[field.name]) for field in fields(hint)))
        return {int: lambda: rng.choice(NUMBERS), float: rng.random, str: lambda: self.text()}[hint]()

    def text(self) -> str:
        return self.rng.choice((*TEXTS, *self.addresses))


def world(**options) -> World:
    return World(adding(4, 2, replicas=2, **options), num_servers=2, num_workers=2, steps=6)


def forge(job: World, seed: int, count: int, in_names_of_members: bool) -> None:
    """Have messages come to every machine while the job runs."""
    machines = [MANAGER, *job.servers, *(worker.address for worker in job.workers)]
    forger = Forger(seed, machines)
    for number in range(count):
        source = forger.rng.choice(machines) if in_names_of_members else f"x{number % 5}"

        def send(source=source) -> None:
            target = forger.rng.choice(machines)
            if target in job.network.machines and source != target:
                job.network.send([forger.message(source, target, job.manager.view.number)])

        job.network.at(6.0 * number / count, send)


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_exact_whatever_strangers_say(seed):
    job = world()
    forge(job, seed, 2000, in_names_of_members=False)
    job.run()
    expected = torch.full((4,), 12.0)
    assert torch.equal(job.weights(), expected) and torch.equal(job.weights(-1), expected)
    heard = [job.manager, *job.servers.values(), *(worker.client for worker in job.workers)]
    assert all(machine.foreign > 0 for machine in heard)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_raised_whatever_members_say(seed):
    job = world()
    forge(job, seed, 2000, in_names_of_members=True)
    job.network.run(until=lambda: job.network.now > 7.0, limit=100_000)


def test_what_is_too_long_is_not_decoded():
    """A place in a vector of 2^62 elements."""
    places = torch.tensor([1], dtype=torch.int32)
    assert not fits(m.Coded("fp32+sparse", 1 << 62, (torch.ones(1), places)), 4)
