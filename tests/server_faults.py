"""Random histories of a parameter server's job, with crashes, stops, joins, losses, and what must hold in them.

A ``Plan`` is a few numbers that Hypothesis draws; ``play`` runs it on the virtual clock and checks. Worker i pushes a
1 into element i of every range, so that the weights are the counts of what was applied, exactly.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st

from lightning_parallel.parameter_server import (
    BSP,
    ESSP,
    SSP,
    AddDelta,
    Asynchronous,
    BoundedDelay,
    Layout,
    Rules,
    Server,
    staleness_bound,
)
from lightning_parallel.parameter_server.filters import Filters, SignificantlyModified
from lightning_parallel.parameter_server.server.replica import Replica
from lightning_parallel.parameter_server.transport.virtual import VirtualNetwork
from tests.server_watch import Watch, WatchedReplica, watched
from tests.server_world import Read, World, WorldWorker, random_network

WIDTH = 10  # elements of a range: more than workers ever come
RULES = [BSP(), SSP(0), SSP(1), SSP(3), ESSP(2), BoundedDelay(2), Asynchronous()]


@dataclass(frozen=True)
class Plan:
    """One job and what befalls it."""

    seed: int
    rule: int = 2
    workers: int = 3
    servers: int = 3
    ranges: int = 2
    steps: int = 6
    aggregate: int = 1
    server_faults: int = 1  # crashes or stops
    worker_faults: int = 0
    server_joins: int = 0
    worker_joins: int = 0
    lossy: bool = False
    ordered: bool = True
    sparse: bool = False
    joined: bool = False
    manager_faults: int = 0  # it is started again after a while
    boards: bool = False  # tails show what they have, dead ones too


plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    rule=st.integers(0, len(RULES) - 1),
    workers=st.integers(1, 4),
    servers=st.integers(1, 5),
    ranges=st.integers(1, 3),
    steps=st.integers(1, 7),
    aggregate=st.integers(1, 4),
    server_faults=st.integers(0, 2),
    worker_faults=st.integers(0, 2),
    server_joins=st.integers(0, 2),
    worker_joins=st.integers(0, 2),
    lossy=st.booleans(),
    ordered=st.booleans(),
    sparse=st.booleans(),
    joined=st.booleans(),
    manager_faults=st.integers(0, 1),
    boards=st.booleans(),
)


class Faults(World):
    """A world with a plan."""

    def __init__(self, plan: Plan, replica_class: type[Replica] = WatchedReplica, server_class=Server, boards=None):
        self.plan, self.watch, self.rng = plan, Watch(), random.Random(plan.seed)
        rules = Rules(
            Layout(WIDTH * plan.ranges, plan.ranges),
            AddDelta(),
            RULES[plan.rule],
            scale="sum",
            aggregate=plan.aggregate,
            flush_after=0.3,
            window=3,
            lease=10.0,
            resend_after=2.0,
        )
        super().__init__(
            rules,
            plan.servers,
            plan.workers,
            plan.steps,
            lambda worker, step: self.rng.expovariate(1.0),
            self._network(),
            work=self._push,
            on_read=self._check_read,
            joined=plan.joined,
            server_class=watched(self.watch, replica_class, server_class),
            boards=boards,
        )
        self.staleness = getattr(RULES[plan.rule], "staleness", None) or getattr(RULES[plan.rule], "delay", 0)
        self._plan_faults()

    def _network(self) -> VirtualNetwork:
        lose, double = (0.02, 0.02) if self.plan.lossy else (0.0, 0.0)
        network = random_network(self.plan.seed + 1, 0.1, lose, double)
        network.ordered = self.plan.ordered
        return network

    def add_worker(self, name: str, steps: int | None = None) -> WorldWorker:
        worker = super().add_worker(name, steps)
        if self.plan.sparse:
            worker.client.filters = Filters([SignificantlyModified(0.0)])
        return worker

    def _push(self, worker: WorldWorker, result) -> torch.Tensor:
        push = torch.zeros(self.plan.ranges, WIDTH)
        push[:, worker.client.worker - 1] = 1
        return push.flatten()

    def _plan_faults(self) -> None:
        plan, draw = self.plan, self.rng
        span = 2.0 * plan.steps
        for _ in range(min(plan.server_faults, plan.servers - 1)):
            self.network.at(draw.uniform(0, span), self._break_server)
        for _ in range(plan.worker_faults):
            self.network.at(draw.uniform(0, span), self._break_worker)
        for _ in range(plan.manager_faults):
            self.network.at(draw.uniform(0, span), self._break_manager)
        for _ in range(plan.server_joins):
            self.network.at(draw.uniform(0, span), self.add_server)
        for index in range(plan.worker_joins):
            name = draw.choice([f"w{draw.randrange(plan.workers)}", f"new{index}"])
            self.network.at(draw.uniform(0, span), lambda name=name: self.add_worker(name, plan.steps))

    def _break_server(self) -> None:
        chains = [address for chain in self.manager.view.chains.values() for address in chain]
        live = [address for address in chains or self.servers if address in self.network.machines]
        if not live:
            return
        victim = self.rng.choice(live)
        if chains and self.rng.random() < 0.3:
            self.network.stop(victim)  # longer than the lease: it comes back as one that nobody listens to
            self.network.at(self.network.now + 25, lambda: self.network.go_on(victim))
        else:
            self.network.crash(victim)
            if not chains:
                self.add_server()  # before the first view the manager waits for so many

    def _break_manager(self) -> None:
        self.network.crash("manager")
        self.network.at(self.network.now + self.rng.uniform(0.5, 15.0), self.start_manager)

    def _break_worker(self) -> None:
        victims = [worker for worker in self.running if worker.client.view.number]
        if not victims:
            return
        victim = self.rng.choice(victims)
        if self.rng.random() < 0.3:
            self.network.stop(victim.address)
            self.network.at(self.network.now + 25, lambda: self.network.go_on(victim.address))
        else:
            self.network.crash(victim.address)

    def _check_read(self, worker: WorldWorker, read: Read) -> None:
        result, client = read.result, worker.client
        if self.rules.consistency.own:
            assert result.seqs.get(read.worker, 0) >= client.seq, "a worker does not see its own pushes"
        assert result.minimum >= self.rules.consistency.need(read.clock), "a read is too stale"
        if not isinstance(self.rules.consistency, Asynchronous):
            self._check_gap(read)
        if len(worker.reads) > 1:
            before = worker.reads[-2].result
            assert result.version >= before.version and result.minimum >= before.minimum, "a read went back"
        self._check_values(result)

    def _check_gap(self, read: Read) -> None:
        clocks = [w.client.clock for w in self.running if w.client.clock is not None and not self._is_out(w)]
        assert not clocks or read.clock - min(clocks) <= self.staleness, "a worker ran ahead"

    def _is_out(self, worker: WorldWorker) -> bool:
        """Whether servers have let a worker go that does not know it."""
        return worker.address not in self.manager.view.workers.values() or worker.address in self.network.stopped

    def _check_values(self, result) -> None:
        rows = result.vector.view(self.plan.ranges, WIDTH)
        for key, row in enumerate(rows):
            if not result.torn:
                pushed = {worker: seq for worker, seq in result.seqs.items() if seq}
                assert pushed in self.watch.versions(key), f"range {key} never had the version that was read"
            for worker, seq in result.seqs.items():
                if worker not in result.torn:
                    assert row[worker - 1] == seq, "a read has other values than its version"

    def check_end(self) -> None:
        """Every push that a worker was told of is in every replica, none twice."""
        for key, chain in self.manager.view.chains.items():
            parts = [self.servers[address].replicas[key].part for address in chain]
            for part in parts:
                counts = {worker: int(part.weights[worker - 1]) for worker in part.seqs}
                assert counts == part.seqs, f"range {key} has {counts} and was told of {part.seqs}"
                assert part.weights.sum() == sum(part.seqs.values()) == part.version
                assert torch.equal(part.weights, parts[0].weights) and part.lsn == parts[0].lsn
            for worker in self.workers:
                self._check_worker(worker, key, parts[0].seqs)

    def _check_worker(self, worker: WorldWorker, key: int, seqs: dict[int, int]) -> None:
        client = worker.client
        if client.worker is None:
            return
        acknowledged = min(client.unacked[key], default=client.seq + 1) - 1
        assert seqs.get(client.worker, 0) >= acknowledged, "an acknowledged push is lost"
        if worker.finished and not client.lost:
            assert seqs.get(client.worker, 0) == client.seq == worker.steps

    def check_ages(self) -> None:
        if isinstance(self.rules.consistency, Asynchronous):
            return
        ages = [r.intake.staleness.most for server in self.servers.values() for r in server.replicas.values()]
        assert max(ages, default=0) <= staleness_bound(len(self.workers), self.staleness), "a push is too old"


def play(plan: Plan, limit: int = 60_000, **options) -> Faults:
    """Run a plan to its end and check all that must hold."""
    with tempfile.TemporaryDirectory() as folder:
        world = Faults(plan, boards=Path(folder) if plan.boards else None, **options)
        world.run(limit)
        world.settle(limit)
    world.check_end()
    world.check_ages()
    return world
