"""Staleness: counts against a slow count, bounds against the recursion of SSP, the metric as one of torchmetrics."""

import pickle
import random

import pytest
import torch
from torchmetrics import MetricCollection

from lightning_parallel.measure.staleness import Access, StalenessReading, StalenessSums, regret_bound
from lightning_parallel.measure.staleness_picture import draw_staleness
from lightning_parallel.parameter_server.trainer.staleness_metric import Staleness
from lightning_parallel.parameter_server.trainer.versions import Ages, Versions


def run_of_ssp(num_workers: int, staleness: int, steps: int, seed: int) -> list[list[Access]]:
    """Accesses of SSP on a virtual clock: start[p][c] = max(end[p][c-1], M[c-s]), M[k] = the last end of clock k-1."""
    draw = random.Random(seed)
    starts, ends = [[[0.0] * steps for _ in range(num_workers)] for _ in range(2)]
    for clock in range(steps):
        gate = max(end[clock - staleness - 1] for end in ends) if clock > staleness else 0.0
        for worker in range(num_workers):
            starts[worker][clock] = max(ends[worker][clock - 1] if clock else 0.0, gate)
            ends[worker][clock] = starts[worker][clock] + draw.paretovariate(1.1)

    def others(worker: int) -> list[float]:
        return [end for other, one in enumerate(ends) if other != worker for end in one]

    return [
        [
            Access(
                worker, clock,
                gap=clock - min(sum(end <= starts[worker][clock] for end in one) for one in ends),
                read=sum(end <= starts[worker][clock] for end in others(worker)),
                written=sum(end < ends[worker][clock] for end in others(worker)),
            )
            for clock in range(steps)
        ]
        for worker in range(num_workers)
    ]  # fmt: skip


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_keeps_to_the_bounds_that_are_logged_beside_it(num_workers, staleness):
    for seed in range(8):
        accesses = run_of_ssp(num_workers, staleness, 25, seed)
        reading = StalenessReading(dict(enumerate(map(StalenessSums.of, accesses))), staleness)
        found = reading.metrics()
        assert found["parallel/staleness_max"] <= found["parallel/staleness_max_bound"]
        assert found["parallel/staleness_gap_max"] <= found["parallel/staleness_gap_bound"]
        ages = [access.staleness for one in accesses for access in one]
        assert found["parallel/staleness_mean"] == pytest.approx(sum(ages) / len(ages))


def test_the_bound_on_the_regret_is_ho_2013_theorem_1():
    """With F = 2, L = 3, s = 3, P = 8, T = 1024: 4 * 6 * sqrt(64 / 1024) = 6."""
    assert regret_bound(8, 3, 1024, distance=2.0, lipschitz=3.0) == 6.0


def test_ages_count_what_came_between_whoever_asks_and_when():
    """Against a list of all pushes in their order."""
    draw, order, pushes, seqs = random.Random(0), {}, [], {1: 0, 2: 0, 3: 0}
    for lsn in range(1, 200):
        if draw.random() < 0.1:
            continue  # an entry of the history that is no push
        worker, filled = draw.choice([1, 2, 3]), int(draw.random() < 0.8)
        seqs[worker] += 1
        order[lsn] = [(worker, seqs[worker], filled, 0)]
        pushes.append((worker, seqs[worker], filled))
    ages = Ages()
    for part in (range(60), range(60, 130), range(130, 200)):
        ages.take({lsn: order[lsn] for lsn in part if lsn in order})
    for at, (worker, seq, filled) in enumerate(pushes):
        before = sum(f for w, _, f in pushes[:at] if w != worker)
        assert ages.written(worker, seq) == ((before, False) if filled else None)
        so_far = {w: sum(other == w for other, _, _ in pushes[:at]) for w in seqs}
        assert ages.held(so_far, worker) == before


def test_a_dropped_update_is_told():
    versions = Versions(2, None, lambda since: {3: [(7, 1, 1, 1)]} if since < 3 else {}, lambda value: [value])
    versions.note(Access(0, 0, 0, 0), {}, number=7, seq=1)
    assert [access.dropped for access in versions.take()] == [True] and versions.take() == []


def test_the_metric_merges_like_any_other():
    whole, parts = Staleness("mean"), [Staleness("mean"), Staleness("mean")]
    for part, ages in zip(parts, ([0, 4], [1, 200, 3]), strict=True):
        part.update(torch.tensor(ages))
        whole.update(torch.tensor(ages))
    parts[0].merge_state(parts[1])
    assert parts[0].compute() == whole.compute() == pytest.approx(41.6)
    assert torch.equal(parts[0].histogram, whole.histogram) and whole.histogram[-1] == 1
    assert parts[0].most == 200 and pickle.loads(pickle.dumps(whole)).compute() == whole.compute()
    both = MetricCollection({"mean": Staleness("mean"), "max": Staleness("max")})
    both.update([Access(0, 0, 0, 1, 4), Access(0, 1, 0, 1)])
    assert both.compute() == {"mean": 3, "max": 3}
    assert both(2)["mean"] == 2 and both.compute() == {"mean": 2.5, "max": 3}
    whole.reset()
    assert whole.total == 0 and whole.histogram.sum() == 0


def test_ages_before_reads_are_refused():
    with pytest.raises(ValueError, match=r"Staleness got an age of -1\. An update is made after its read\."):
        Staleness().update(-1)


def test_the_picture_is_drawn(tmp_path):
    for bound in (2, None):
        draw_staleness(tmp_path / "a.png", StalenessReading({0: StalenessSums.of([Access(0, 0, 1, 0, 2)])}, bound))
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
