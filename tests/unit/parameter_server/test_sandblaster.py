"""L-BFGS on shards against SciPy's, whichever worker's result of a portion comes first; portions count once."""

import random

import numpy as np
import pytest
import scipy.optimize
import torch

from lightning_parallel.parameter_server import AddDelta, Asynchronous, Layout, Manager, Rules, Server
from lightning_parallel.parameter_server.manager.portions import Portions
from lightning_parallel.parameter_server.manager.roster import Roster
from lightning_parallel.parameter_server.messages import Portion
from lightning_parallel.parameter_server.sandblaster.caller import Caller, ServerShards
from lightning_parallel.parameter_server.sandblaster.helper import Helper
from lightning_parallel.parameter_server.sandblaster.lbfgs import LBFGS, LocalShards, perform
from tests.server_world import random_network

ROWS, COLUMNS, PORTIONS = 120, 9, 12


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Logistic regression with a penalty: convex, with one minimum."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    return features, (torch.rand(ROWS, generator=generator) < 0.4).to(torch.float64)


def portion_of(x: torch.Tensor, portion: int) -> tuple[float, torch.Tensor]:
    features, labels = (data[portion::PORTIONS] for data in problem())
    z = features @ x
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, labels, reduction="sum")
    penalty = 0.05 / PORTIONS
    return float(loss + penalty * x @ x), features.T @ (torch.sigmoid(z) - labels) + 2 * penalty * x


def whole(x: np.ndarray) -> tuple[float, np.ndarray]:
    results = [portion_of(torch.from_numpy(x), portion) for portion in range(PORTIONS)]
    return sum(loss for loss, _ in results), sum(gradient for _, gradient in results).numpy()


def scipys() -> scipy.optimize.OptimizeResult:
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 500}
    return scipy.optimize.minimize(whole, np.zeros(COLUMNS), jac=True, method="L-BFGS-B", options=options)


@pytest.mark.parametrize("ranges", [1, 2, 4])
def test_the_minimum_is_scipys(ranges):
    shards = LocalShards(Layout(COLUMNS, ranges).split(torch.zeros(COLUMNS)))

    def evaluate() -> float:
        loss, gradient = whole(torch.cat([vectors["x"] for vectors in shards.vectors]).numpy())
        for vectors, part in zip(
            shards.vectors, Layout(COLUMNS, ranges).split(torch.from_numpy(gradient)), strict=True
        ):
            vectors["g"] = part.clone()
        return loss

    loss = LBFGS(shards, evaluate).run()
    reference = scipys()
    assert loss == pytest.approx(reference.fun, abs=1e-9)
    np.testing.assert_allclose(torch.cat([v["x"] for v in shards.vectors]).numpy(), reference.x, atol=1e-6)


def shared_out(rng: random.Random, x: torch.Tensor, counts) -> tuple[float, torch.Tensor, int]:
    """A batch in portions, workers of random speed, some of whom die; whichever result is first counts."""
    portions, loss, gradient = Portions(PORTIONS), 0.0, torch.zeros(COLUMNS, dtype=torch.float64)
    busy: dict[str, int] = {}
    while not portions.is_done:
        for worker in [f"w{i}" for i in range(4) if f"w{i}" not in busy]:
            taken = portions.next(worker)
            if taken is not None:
                busy[worker] = taken
        worker = rng.choice(sorted(busy))
        portion = busy.pop(worker)
        if rng.random() < 0.1:
            portions.leave(worker)
        elif portions.finish(portion):
            counts[portion] += 1
            part_loss, part = portion_of(x, portion)
            loss, gradient = loss + part_loss, gradient + part
    return loss, gradient, portions.duplicated


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_on_servers_that_fail_it_is_scipys_too_whichever_duplicate_wins(seed):
    rng, network = random.Random(seed), random_network(seed, mean=0.01, lose=0.01, double=0.01)
    rules = Rules(Layout(COLUMNS, 3), AddDelta(), Asynchronous(), lease=10.0, resend_after=0.5)
    network.add(Manager(rules, 4, 0), [])
    for index in range(4):
        server = Server(f"s{index}", rules)
        network.add(server, server.start(0.0))
    caller = Caller("coordinator", rules)
    network.add(caller, caller.start(0.0))
    network.run(until=lambda: caller.view.number > 0)

    def do(start, until) -> None:
        network.send(start(network.now))
        network.run(until=until)

    shards = ServerShards(caller, do)
    network.send(caller.seed(torch.zeros(COLUMNS)))
    network.at(network.now + 3.0, lambda: network.crash("s0"))
    counts, duplicated = [0] * PORTIONS, 0

    def read() -> torch.Tensor:
        """x, by its products with unit vectors: no vector leaves the servers."""
        columns = []
        for index in range(COLUMNS):
            shards.call("zero", "unit", "x")
            shards.call("add", "unit", vector=torch.eye(COLUMNS)[index])
            columns.append(shards.call("dot", "unit", "x"))
        return torch.tensor(columns, dtype=torch.float64)

    def evaluate() -> float:
        nonlocal duplicated
        loss, gradient, twice = shared_out(rng, read(), counts)
        duplicated += twice
        shards.call("zero", "g", "x")
        high = gradient.to(torch.float32)  # what travels is float32: twice, for all of a float64
        shards.call("add", "g", vector=high)
        shards.call("add", "g", vector=(gradient - high).to(torch.float32))
        return loss

    LBFGS(shards, evaluate, tolerance=1e-8).run()
    assert duplicated > 0 and len(set(counts)) == 1  # every portion counted once in every evaluation
    np.testing.assert_allclose(read().numpy(), scipys().x, atol=1e-6)


class Solver:
    """A helper that computes a portion's loss and gradient at the point that it got from the servers."""

    def __init__(self, helper: Helper, rng: random.Random):
        self.helper, self.rng, self.address, self.finish_at = helper, rng, helper.address, None

    view = property(lambda self: self.helper.view)

    @property
    def wake_at(self):
        return min((time for time in (self.helper.wake_at, self.finish_at) if time is not None), default=None)

    def handle(self, message, now):
        out = self.helper.handle(message, now)
        if self.finish_at is not None and now >= self.finish_at:
            self.finish_at = None
            value, gradient = portion_of(self.helper.vector, self.helper.portion.portion)
            out += self.helper.give(gradient, value)
        elif self.helper.has_work and self.finish_at is None:
            self.finish_at = now + self.rng.expovariate(10.0)
        return out


def carries_a_vector(message) -> bool:
    return any(isinstance(getattr(message.body, name, None), torch.Tensor) for name in ("values", "weights", "vector"))


@pytest.mark.parametrize("seed", range(2))
def test_the_coordinator_never_sees_a_vector_and_helpers_read_the_point_from_the_servers(seed):
    """A server, a helper and the manager die meanwhile."""
    rng, network = random.Random(seed), random_network(seed, mean=0.01, lose=0.01, double=0.01)
    rules = Rules(Layout(COLUMNS, 3), AddDelta(), Asynchronous(), lease=10.0, resend_after=0.5)
    log, vectors, delay = [Roster()], [], network.delay

    def watched(message) -> float:
        if "coordinator" in (message.source, message.target) and carries_a_vector(message):
            vectors.append(message)
        return delay(message)

    def manage() -> None:
        manager = Manager(rules, 4, 0, roster=log[-1], journal=log.append)
        network.add(manager, manager.start(network.now))

    network.delay = watched
    manage()
    for index in range(4):
        server = Server(f"s{index}", rules)
        network.add(server, server.start(0.0))
    solvers = [Solver(Helper(f"h{index}", rules), rng) for index in range(3)]
    for solver in solvers:
        network.add(solver, solver.helper.start(0.0))
    caller = Caller("coordinator", rules)
    network.add(caller, caller.start(0.0))
    network.run(until=lambda: caller.view.number > 0 and solvers[0].helper.view.number > 0)
    network.send(solvers[0].helper.seed(torch.zeros(COLUMNS)))

    def do(start, until) -> None:
        network.send(start(network.now))
        network.run(until=until)

    shards = ServerShards(caller, do)
    network.at(network.now + 3.0, lambda: network.crash("s0"))
    network.at(network.now + 5.0, lambda: network.crash("h1"))
    network.at(network.now + 7.0, lambda: network.crash("manager"))
    network.at(network.now + 8.0, manage)
    loss = LBFGS(shards, lambda: shards.share(PORTIONS), tolerance=1e-8).run()
    assert network.now > 8.0 and not vectors
    assert loss == pytest.approx(scipys().fun, abs=1e-9)
    network.send(solvers[0].helper.leave())
    last = Helper("reader", rules)
    network.add(last, last.start(network.now))
    network.run(until=lambda: last.view.number > 0)
    last.portion = Portion(caller.batch.batch, 0)
    network.send(last._read(caller.batch.batch))
    network.run(until=lambda: last.vector is not None)
    np.testing.assert_allclose(last.vector.numpy(), scipys().x, atol=1e-6)


def test_a_call_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"No vector 'h' in \('dot', 'g', 'h'\); vectors are g\."):
        perform({"g": torch.zeros(1)}, ("dot", "g", "h"))
