"""A batch in small portions: handed to whoever is idle, those that are late handed out twice, each counted once.

The one idea: portions are much smaller than a worker's share, so that fast workers take more of them; at the end
whoever is idle repeats what is still outstanding, at once or once it is late, and the first result of a portion is the
one that counts. Left out: what a portion's result is.

Source:
    Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2 (Sandblaster).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable


class Portions:
    """The portions of one batch.

    Args:
        count: portions, numbered from 0.
        finished: those that have a result already.
        patience: a portion is late once it has been out so many times as long as the slowest of those that are done
            took; 0 if every one is that is out.

    Example:
        >>> portions = Portions(2)
        >>> portions.next("a"), portions.next("b"), portions.next("c")
        (0, 1, 0)
        >>> portions.finish(0), portions.finish(0), portions.finish(1)
        (True, False, True)
        >>> portions.is_done
        True
        >>> portions = Portions(2, patience=2.0)
        >>> portions.next("a", prefers=1, now=0.0), portions.next("b", now=0.0), portions.finish(1, now=3.0)
        (1, 0, True)
        >>> portions.next("a", now=5.0), portions.late_at(["a"]), portions.next("a", now=6.0)
        (None, 6.0, 0)
    """

    def __init__(self, count: int, finished: Iterable[int] = (), patience: float = 0.0) -> None:
        if count < 1:
            raise ValueError(f"Portions got count={count}. A batch has 1 or more.")
        self.count, self.patience, self.duplicated = count, patience, 0
        self.finished = set(finished)
        self._fresh = [portion for portion in range(count) if portion not in self.finished]
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._since: dict[int, float] = {}  # when it was handed out last
        self._slowest: float | None = None  # how long the slowest of those took that are done, seconds

    @property
    def is_done(self) -> bool:
        """Whether every portion has a result."""
        return len(self.finished) == self.count

    def next(self, worker: str, prefers: int = -1, now: float = 0.0) -> int | None:
        """A portion for an idle worker, the one that it prefers if it is there; None if every one that is left is with
        it already, or not late."""
        if self._fresh:
            portion = prefers if prefers in self._fresh else self._fresh[0]
            self._fresh.remove(portion)
        else:
            late = [portion for portion in self._out_for(worker) if now >= self._late_at(portion)]
            if not late:
                return None
            portion = min(late, key=lambda one: (len(self._holders[one]), one))
            self.duplicated += bool(self._holders[portion])
        self._holders[portion].add(worker)
        self._since[portion] = now
        return portion

    def late_at(self, workers: Iterable[str]) -> float | None:
        """When a portion will be late that one of these idle workers could repeat; None if none will be."""
        times = [self._late_at(portion) for worker in workers for portion in self._out_for(worker)]
        return min((time for time in times if time < math.inf), default=None)

    def _out_for(self, worker: str) -> list[int]:
        """The portions that others have."""
        return [p for p, holders in self._holders.items() if p not in self.finished and worker not in holders]

    def _late_at(self, portion: int) -> float:
        if not self.patience:
            return -math.inf
        return math.inf if self._slowest is None else self._since[portion] + self.patience * self._slowest

    def finish(self, portion: int, now: float = 0.0) -> bool:
        """Whether a result of a portion is the first, and counts."""
        first = portion in range(self.count) and portion not in self.finished
        if first:
            self.finished.add(portion)
            self._slowest = max(self._slowest or 0.0, now - self._since.get(portion, now))
            self._fresh = [fresh for fresh in self._fresh if fresh != portion]
        return first

    def leave(self, worker: str) -> None:
        """A worker is gone: what only it had is handed out again."""
        for portion, holders in self._holders.items():
            holders.discard(worker)
            if not holders and portion not in self.finished and portion not in self._fresh:
                self._fresh.append(portion)
