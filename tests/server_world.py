"""A job of the parameter server in one process, on the virtual clock.

``World`` starts all of it and runs it to its end; what workers read, when, and what they pushed is kept for checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_parallel.parameter_server import AddDelta, Client, Layout, Manager, Result, Rules, Server
from lightning_parallel.parameter_server.manager.roster import Roster
from lightning_parallel.parameter_server.messages import Message
from lightning_parallel.parameter_server.transport.board import Board, Boards
from lightning_parallel.parameter_server.transport.virtual import VirtualNetwork


@dataclass
class Read:
    """One read of a worker: when it was answered, at which of its clocks, and the answer."""

    worker: int
    clock: int
    time: float
    result: Result


class WorldWorker:
    """Pulls, computes for a while, pushes, as often as it is told."""

    def __init__(self, world: World, address: str, name: str, steps: int, seconds: Callable[[int], float]) -> None:
        self.world, self.steps, self.seconds = world, steps, seconds
        self.client = Client(address, name, world.rules)
        self.address, self.done, self.reads = address, 0, list[Read]()
        self.starts, self.ends = list[float](), list[float]()
        self.finish_at: float | None = None  # when the computation in hand ends
        self.seeded = self.finished = False
        self.waits = False  # computed, and waits for room to push
        self.settles = False  # pushed, and pulls once all replicas have it
        self.began: Result | None = None  # the answer that was begun with last

    @property
    def wake_at(self) -> float | None:
        computing = None if self.waits or self.client.lost else self.finish_at
        return min((time for time in (self.client.wake_at, computing) if time is not None), default=None)

    def handle(self, message: Message, now: float) -> list[Message]:
        out = self.client.handle(message, now)
        if self.client.view.number and not self.seeded:
            self.seeded = True
            out += self.client.seed(self.world.initial)
        if self.settles and self.client.is_settled and not self.client.lost:
            self.settles = False
            out += self.client.pull(now)
        self._begin(now)
        if self.finish_at is not None and now >= self.finish_at and not self.client.lost:
            self.waits = not self.client.may_push
            out += [] if self.waits else self._end(now)
            self._begin(now)
        if self.done == self.steps and self.client.is_settled and not self.finished and self.finish_at is None:
            self.finished = True
            self.world.on_finished(self)
            out += self.client.leave() if self.world.leave else []
        return out

    def _begin(self, now: float) -> None:
        result = self.client.result
        if result is None or result is self.began or self.finish_at is not None:
            return
        self.began = result
        assert self.client.clock is not None and self.client.worker is not None
        if self.done == self.steps:
            return
        read = Read(self.client.worker, self.client.clock, now, result)
        self.reads.append(read)
        self.world.on_read(self, read)
        self.starts.append(now)
        self.finish_at = now + self.seconds(self.done)

    def _end(self, now: float) -> list[Message]:
        self.finish_at, self.done = None, self.done + 1
        self.ends.append(now)
        vector, goes_on = self.world.work(self, self.reads[-1].result), self.done < self.steps
        if goes_on and self.world.joined:
            return self.client.push_pull(vector, now)
        self.settles = goes_on and self.world.boards is not None
        at_once = goes_on and not self.settles
        return self.client.push(vector, now) + (self.client.pull(now) if at_once else [])


@dataclass
class World:
    """Everything of a job. ``work`` makes a push from a read; the default pushes ones, so that sums are counts."""

    rules: Rules
    num_servers: int = 1
    num_workers: int = 1
    steps: int = 5
    seconds: Callable[[int, int], float] = lambda worker, step: 1.0
    network: VirtualNetwork = field(default_factory=VirtualNetwork)
    initial: torch.Tensor | None = None
    work: Callable[[WorldWorker, Result], torch.Tensor | None] = None  # type: ignore[assignment]
    on_read: Callable[[WorldWorker, Read], None] = lambda worker, read: None
    leave: bool = True
    joined: bool = False  # a push and the pull after it are asked for at once
    server_class: type[Server] = Server
    boards: Path | None = None  # folder of the boards, if servers have any; then workers pull when pushes have settled

    def __post_init__(self) -> None:
        size = self.rules.layout.size
        self.initial = torch.zeros(size) if self.initial is None else self.initial
        self.work = self.work or (lambda worker, result: torch.ones(size))
        self.roster: Roster | None = None  # the manager's log
        self.start_manager()
        self.servers: dict[str, Server] = {}
        self.workers: list[WorldWorker] = []
        self.finished: list[WorldWorker] = []
        for _ in range(self.num_servers):
            self.add_server()
        for index in range(self.num_workers):
            self.add_worker(f"w{index}")

    def start_manager(self) -> None:
        """The first one, or one that goes on from the log of the one before."""
        self.manager = Manager(
            self.rules, self.num_servers, self.num_workers, roster=self.roster, journal=self.write_roster
        )
        self.network.add(self.manager, self.manager.start(self.network.now))

    def write_roster(self, roster: Roster) -> None:
        self.roster = roster

    def add_server(self) -> str:
        address = f"s{len(self.servers)}"
        server = self.servers[address] = self.server_class(address, self.rules)
        if self.boards is not None:
            server.board = Board(self.boards, address, self.rules.layout)
        self.network.add(server, server.start(self.network.now))
        return address

    def add_worker(self, name: str, steps: int | None = None) -> WorldWorker:
        index = len(self.workers)
        count = self.steps if steps is None else steps
        worker = WorldWorker(self, f"{name}.{index}", name, count, lambda step: self.seconds(index, step))
        if self.boards is not None:
            worker.client.look = Boards(self.boards, self.rules.layout, self.rules.lease).look
        self.workers.append(worker)
        self.network.add(worker, worker.client.start(self.network.now))
        return worker

    def on_finished(self, worker: WorldWorker) -> None:
        self.finished.append(worker)

    @property
    def running(self) -> list[WorldWorker]:
        return [worker for worker in self.workers if self.is_running(worker)]

    def is_running(self, worker: WorldWorker) -> bool:
        return not worker.finished and not worker.client.lost and worker.address in self.network.machines

    def run(self, limit: int = 200_000) -> World:
        """To the end: every worker that lives has finished, and its last messages have arrived."""
        self.network.run(until=lambda: not any(map(self.is_running, self.workers)), limit=limit)
        assert not self.running, f"stuck at {self.network.now} s"
        return self

    def settle(self, limit: int = 20_000) -> World:
        """On until nothing is under way but leases: the chains are where they belong, and their servers equal."""
        end = self.network.now + 10 * self.rules.lease
        next_look = self.network.now

        def over() -> bool:
            nonlocal next_look
            if self.network.now < next_look:
                return False
            next_look = self.network.now + 2.0
            return self.is_quiet() or self.network.now > end

        self.network.run(until=over, limit=limit)
        return self

    def is_quiet(self) -> bool:
        """Whether every server of every chain has and knows the same."""
        view = self.manager.view
        for key, chain in view.chains.items():
            if key in view.joining or any(a not in self.network.machines or a in self.network.stopped for a in chain):
                return False
            replicas = [self.servers[address].replicas.get(key) for address in chain]
            if len({(r and r.part.lsn, r and r.committed, r and r.view.number) for r in replicas}) > 1:
                return False
            if replicas[0] is None or replicas[0].committed < replicas[0].part.lsn:
                return False
        return True

    def live_servers(self) -> list[Server]:
        return [server for address, server in self.servers.items() if address in self.network.machines]

    def part(self, key: int, place: int = 0):
        """A range as the server at a place of its chain has it."""
        chain = self.manager.view.chains[key]
        return self.servers[chain[place]].replicas[key].part

    def weights(self, place: int = 0) -> torch.Tensor:
        return torch.cat([self.part(key, place).weights for key in range(self.rules.layout.num_ranges)])


def adding(size: int = 4, ranges: int = 2, **options) -> Rules:
    """Rules under which sums are counts."""
    options.setdefault("update", AddDelta())
    options.setdefault("scale", "sum")
    return Rules(Layout(size, ranges), **options)


def random_network(seed: int, mean: float = 0.05, lose: float = 0.0, double: float = 0.0) -> VirtualNetwork:
    """Delays with a long tail, and messages that are lost or doubled."""
    rng = random.Random(seed)

    def fate(message: Message) -> int:
        draw = rng.random()
        return 0 if draw < lose else 2 if draw < lose + double else 1

    return VirtualNetwork(lambda message: rng.expovariate(1 / mean), fate)
