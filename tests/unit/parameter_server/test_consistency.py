"""What a read sees, and when: every rule on the virtual clock, against the oracle and the bounds of theory."""

import numpy as np
import pytest

from lightning_parallel.parameter_server import (
    BSP,
    ESSP,
    SSP,
    Asynchronous,
    BoundedDelay,
    DropOlderThan,
    Layout,
    Rules,
    staleness_bound,
)
from tests.server_world import World, adding, random_network


def oracle(durations: np.ndarray, staleness: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends: start[p][c] = max(end[p][c-1], M[c-s]) with M[k] the time at which all have done k clocks."""
    workers, steps = durations.shape
    starts, ends, all_done = np.zeros((workers, steps)), np.zeros((workers, steps)), np.zeros(steps + 1)
    for c in range(steps):
        gate = all_done[c - staleness] if staleness is not None and c > staleness else 0.0
        starts[:, c] = np.maximum(ends[:, c - 1] if c else 0.0, gate)
        ends[:, c] = starts[:, c] + durations[:, c]
        all_done[c + 1] = ends[:, c].max()
    return starts, ends


def draw(kind: str, workers: int, steps: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "exponential":
        return rng.exponential(1.0, (workers, steps))
    durations = np.ones((workers, steps))
    if kind == "transient":
        durations += 10 * (rng.random((workers, steps)) < 0.05)
    else:
        durations[0] *= 4
    return durations


def run(rules: Rules, durations: np.ndarray, servers: int = 1) -> World:
    workers, steps = durations.shape
    world = World(rules, servers, workers, steps, lambda worker, step: durations[worker, step])
    return world.run()


@pytest.mark.parametrize("kind", ["exponential", "transient", "permanent"])
@pytest.mark.parametrize(
    ("rule", "staleness"),
    [(BSP(), 0), (SSP(0), 0), (SSP(1), 1), (SSP(3), 3), (ESSP(2), 2), (BoundedDelay(2), 2), (Asynchronous(), None)],
    ids=str,
)
def test_starts_and_ends_equal_the_oracle(kind, rule, staleness):
    durations = draw(kind, workers=4, steps=30, seed=1)
    world = run(adding(consistency=rule), durations)
    starts, ends = oracle(durations, staleness)
    assert [worker.starts for worker in world.workers] == starts.tolist()
    assert [worker.ends for worker in world.workers] == ends.tolist()


def test_finite_staleness_gains_nothing_against_a_permanent_straggler():
    durations = draw("permanent", workers=4, steps=20, seed=0)
    spans = [max(w.ends[-1] for w in run(adding(consistency=rule), durations).workers) for rule in (BSP(), SSP(3))]
    assert spans[0] == spans[1] == 80.0


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_reads_gaps_and_ages_keep_to_the_bounds(staleness, seed):
    durations = np.random.default_rng(seed).pareto(1.1, (4, 25)) + 1e-3
    gaps = []
    world = World(
        adding(consistency=SSP(staleness), replicas=2), 2, 4, 25, lambda worker, step: durations[worker, step],
        random_network(seed, mean=0.1),
    )  # fmt: skip
    world.on_read = lambda worker, read: gaps.append(read.clock - min(w.client.clock or 0 for w in world.running))
    world.run()
    for worker in world.workers:
        for read in worker.reads:
            assert read.result.minimum >= read.clock - staleness
            assert read.result.seqs[read.worker] == read.clock
            assert len(set(read.result.versions)) == 1
    assert max(gaps) <= staleness
    ages = [r.intake.staleness.most for server in world.servers.values() for r in server.replicas.values()]
    assert 0 < max(ages) <= staleness_bound(4, staleness)


def test_the_age_of_a_push_reaches_its_bound():
    """P = 2, s = 1: the other is a clock behind at the read and does three pushes before this worker's next one."""
    durations = np.ones((2, 8))
    durations[0, 0] = 0.1
    durations[0, 1] = 1000.0
    durations[1, :3] = 1.0
    world = run(adding(ranges=1, consistency=SSP(1)), durations)
    assert world.servers["s0"].replicas[0].intake.staleness.most == staleness_bound(2, 1) == 3


def test_the_gap_after_a_tick_is_one_more_than_the_staleness():
    durations = np.full((2, 12), 0.01)
    durations[1] = 1.0
    world = World(adding(consistency=SSP(2)), 1, 2, 12, lambda worker, step: durations[worker, step])
    gaps = set()
    world.network.run(until=lambda: bool(gaps.add(clock_gap(world)) or not world.running))
    assert max(gaps) == 3


def clock_gap(world: World) -> int:
    clocks = [worker.client.clock or 0 for worker in world.workers]
    return max(clocks) - min(clocks) if len(world.running) == 2 else 0


def test_nobody_waits_while_the_gap_is_small():
    durations = np.random.default_rng(0).uniform(0.9, 1.1, (4, 8))
    world = run(adding(consistency=SSP(3)), durations)
    for worker in world.workers:
        assert worker.starts[1:] == worker.ends[:-1]


def test_bounded_delay_does_not_wait_for_own_pushes_and_ssp_does():
    """Acknowledgements are slow: with a delay the worker goes on, with SSP a read needs the worker's own pushes."""
    spans = {}
    for rule in (SSP(3), BoundedDelay(3)):
        world = World(adding(ranges=1, consistency=rule), 2, 1, 4, lambda worker, step: 0.0)
        world.network.delay = lambda message: 1.0 if type(message.body).__name__ == "Push" else 0.0
        spans[type(rule)] = world.run().workers[0].ends
    assert spans[SSP] == [0.0, 1.0, 2.0, 3.0]
    assert spans[BoundedDelay] == [0.0, 0.0, 0.0, 0.0]


def test_old_pushes_are_dropped_tick_and_are_counted():
    durations = np.ones((3, 10))
    durations[0] = 4.5
    world = run(adding(ranges=1, consistency=DropOlderThan(4)), durations)
    part = world.part(0)
    assert part.dropped > 0
    assert part.version == 30  # a dropped push is a version as well
    assert part.weights[0] == 30 - part.dropped
    assert part.seqs == {1: 10, 2: 10, 3: 10}


def test_a_skipped_step_ticks():
    world = World(adding(consistency=BSP()), num_workers=2, steps=5)
    world.work = lambda worker, result: None if worker is world.workers[0] else world.initial + 1
    world.run()
    assert world.weights().tolist() == [5.0] * 4


def test_eager_reads_are_fresher():
    durations = np.random.default_rng(1).lognormal(0, 0.5, (8, 60))
    behind = {}
    for rule in (SSP(5), ESSP(5)):
        world = run(adding(ranges=1, consistency=rule), durations)
        reads = [read for worker in world.workers for read in worker.reads]
        behind[type(rule)] = min(read.result.minimum - read.clock for read in reads)
        assert all(read.result.minimum >= read.clock - 5 for read in reads)
    assert behind[ESSP] >= behind[SSP] >= -5


def test_numbers_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"SSP got staleness=-1\. It counts clocks: use 0 or more\."):
        SSP(-1)
    with pytest.raises(ValueError, match="BoundedDelay got delay=-2"):
        BoundedDelay(-2)
    with pytest.raises(ValueError, match="DropOlderThan got staleness=-1"):
        DropOlderThan(-1)
    with pytest.raises(ValueError, match="Layout got num_ranges=5 for 4 elements"):
        Layout(4, 5)
    with pytest.raises(ValueError, match=r"Rules got window=0\. Use 1 or more\."):
        Rules(Layout(4), window=0)


@pytest.mark.parametrize("rule", [BSP(), SSP(1), ESSP(1)], ids=repr)
def test_a_push_with_the_pull_after_it_is_one_message_each_way(rule):
    """Where a range lies on one server; what is read is what two messages would have read."""
    found = []
    for joined in (True, False):
        world = World(adding(ranges=1, consistency=rule, replicas=1), 1, 2, steps=5, joined=joined).run()
        found.append([[(read.clock, read.result.seqs) for read in worker.reads] for worker in world.workers])
        found.append(world.network.delivered)
    assert found[0] == found[2] and found[1] < found[3]
