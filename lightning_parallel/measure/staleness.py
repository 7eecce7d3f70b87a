"""How old what a worker read was when its update was applied: the format of it, sums of it, and the bounds beside.

The one idea: whoever reads weights of one version and writes an update that is applied to another, a worker of a
parameter server or a stage of an asynchronous pipeline, is told by an ``Access``: two version numbers, a gap of clocks,
seconds and bytes. All else is counting. Left out: who measures (``parameter_server/trainer/versions.py``), pictures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Access:
    """One iteration: what was read, and what was written with it.

    Args:
        worker: who, a rank.
        clock: iterations that it had finished.
        gap: clocks between it and the slowest at its read.
        read: others' updates in what it read.
        written: others' updates in what its own update was applied to; None if it wrote nothing.
        waited: seconds that its read took.
        pushed: bytes that it sent.
        pushed_unfiltered: bytes that it would have sent without filters.
        pulled: bytes that it got.
        dropped: whether its update was thrown away.

    Example:
        >>> Access(worker=0, clock=4, gap=1, read=7, written=10).staleness
        3
    """

    worker: int
    clock: int
    gap: int
    read: int
    written: int | None = None
    waited: float = 0.0
    pushed: int = 0
    pushed_unfiltered: int = 0
    pulled: int = 0
    dropped: bool = False

    @property
    def staleness(self) -> int | None:
        """Others' updates between its read and its write."""
        return None if self.written is None else self.written - self.read


@dataclass
class StalenessSums:
    """Counts over many accesses; those of several workers, or of several epochs, add up.

    Attributes:
        gaps: clock gap -> reads.
        ages: version staleness -> updates.

    Example:
        >>> one = StalenessSums.of([Access(0, 0, 0, 0, 0), Access(0, 1, 1, 3, 5)])
        >>> two = StalenessSums.of([Access(1, 0, 0, 0, 1, dropped=True)])
        >>> both = one + two
        >>> both.ages == {0: 1, 2: 1, 1: 1}, both.dropped, both.reads
        (True, 1, 3)
    """

    gaps: Counter[int] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    waited: float = 0.0
    dropped: int = 0
    pushed: int = 0
    pushed_unfiltered: int = 0
    pulled: int = 0

    @classmethod
    def of(cls, accesses: Iterable[Access]) -> StalenessSums:
        """Count accesses."""
        sums = cls()
        for access in accesses:
            sums.gaps[access.gap] += 1
            if access.staleness is not None:
                sums.ages[access.staleness] += 1
            sums.waited += access.waited
            sums.dropped += access.dropped
            sums.pushed += access.pushed
            sums.pushed_unfiltered += access.pushed_unfiltered
            sums.pulled += access.pulled
        return sums

    @property
    def reads(self) -> int:
        """Reads that were counted."""
        return sum(self.gaps.values())

    def __add__(self, other: StalenessSums) -> StalenessSums:
        return StalenessSums(
            self.gaps + other.gaps, self.ages + other.ages, self.waited + other.waited, self.dropped + other.dropped,
            self.pushed + other.pushed, self.pushed_unfiltered + other.pushed_unfiltered, self.pulled + other.pulled,
        )  # fmt: skip


def mean_of(histogram: Mapping[int, int]) -> float:
    """Mean of a histogram, value -> how often; 0 of an empty one.

    Example:
        >>> mean_of({0: 1, 2: 3})
        1.5
    """
    count = sum(histogram.values())
    return sum(value * often for value, often in histogram.items()) / count if count else 0.0


def regret_bound(
    num_workers: int, staleness: int, updates: int, distance: float = 1.0, lipschitz: float = 1.0
) -> float:
    """Most average regret of stochastic gradient descent under SSP: 4 F L sqrt(2 (s + 1) P / T).

    For convex losses and the learning rate ``F / (L sqrt(2 (s + 1) P t))`` of update t.

    Args:
        num_workers: P.
        staleness: s, clocks.
        updates: T, of all workers together, >= 1.
        distance: F, half the squared distance of any two points is at most F^2.
        lipschitz: L, of every term of the loss.

    Example:
        >>> regret_bound(num_workers=2, staleness=1, updates=128)
        1.0

    Source:
        Ho et al., NIPS 2013, theorem 1.
    """
    return 4 * distance * lipschitz * math.sqrt(2 * (staleness + 1) * num_workers / updates)


@dataclass(frozen=True)
class StalenessReading:
    """What all workers measured, beside what the rule promises.

    Args:
        workers: sums of each, by rank.
        staleness: the rule's bound on the gap at a read, None if it has none.
        distance, lipschitz: F and L of the bound on the regret.
    """

    workers: Mapping[int, StalenessSums]
    staleness: int | None = None
    distance: float = 1.0
    lipschitz: float = 1.0

    @property
    def all(self) -> StalenessSums:
        """The sums over all workers."""
        return sum(self.workers.values(), StalenessSums())

    @property
    def version_bound(self) -> int | None:
        """Most updates of others between a read and the update made from it: (P - 1)(2 s + 1)."""
        return None if self.staleness is None else (len(self.workers) - 1) * (2 * self.staleness + 1)

    def metrics(self) -> dict[str, float]:
        """Everything under its key."""
        sums = self.all
        found = {
            "mean": mean_of(sums.ages),
            "max": max(sums.ages, default=0),
            "gap_mean": mean_of(sums.gaps),
            "gap_max": max(sums.gaps, default=0),
            "waited_seconds": sums.waited,
            "dropped": sums.dropped,
            "pushed_bytes": sums.pushed,
            "pulled_bytes": sums.pulled,
            "saved_bytes": sums.pushed_unfiltered - sums.pushed,
            **{f"waited_seconds/rank_{rank}": of.waited for rank, of in self.workers.items()},
        }
        return {f"parallel/staleness_{key}": float(value) for key, value in (found | self._bounds()).items()}

    def _bounds(self) -> dict[str, float]:
        if self.staleness is None or self.version_bound is None:
            return {}
        updates = max(1, sum(self.all.ages.values()))
        regret = regret_bound(len(self.workers), self.staleness, updates, self.distance, self.lipschitz)
        return {"max_bound": self.version_bound, "gap_bound": self.staleness, "regret_bound": regret}

    def summary(self) -> str:
        """The reading in words."""
        sums, metrics = self.all, self.metrics()
        gap, age = (_beside(bound) for bound in (self.staleness, self.version_bound))
        return (
            f"staleness of {sum(sums.ages.values())} updates by {len(self.workers)} workers:"
            f" mean {metrics['parallel/staleness_mean']:.2f}, most {max(sums.ages, default=0)}{age};"
            f" clock gap at reads: mean {metrics['parallel/staleness_gap_mean']:.2f}, most"
            f" {max(sums.gaps, default=0)}{gap}; waited {sums.waited:.1f} s in all, dropped {sums.dropped}"
        )


def _beside(bound: int | None) -> str:
    return " (no bound)" if bound is None else f" (bound {bound})"


def histogram_of(counts: Mapping[int, int]) -> tuple[Sequence[int], Sequence[int]]:
    """Every value from 0 to the largest, and how often it was.

    Example:
        >>> histogram_of({0: 2, 2: 1})
        ([0, 1, 2], [2, 0, 1])
    """
    values = list(range(max(counts, default=0) + 1))
    return values, [counts.get(value, 0) for value in values]
