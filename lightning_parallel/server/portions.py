"""A batch in small portions: handed to whoever is idle, those that are late handed out twice, each counted once.

The one idea: portions are much smaller than a worker's share, so that fast workers take more of them; at the end
whoever is idle repeats what is still outstanding, and the first result of a portion is the one that counts. Left out:
what a portion's result is.

Source:
    Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.2 (Sandblaster).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class Portions:
    """The portions of one batch.

    Args:
        count: portions, numbered from 0.
        finished: those that have a result already.

    Example:
        >>> portions = Portions(2)
        >>> portions.next("a"), portions.next("b"), portions.next("c")
        (0, 1, 0)
        >>> portions.finish(0), portions.finish(0), portions.finish(1)
        (True, False, True)
        >>> portions.is_done
        True
    """

    def __init__(self, count: int, finished: Iterable[int] = ()) -> None:
        if count < 1:
            raise ValueError(f"Portions got count={count}. A batch has 1 or more.")
        self.count, self.duplicated = count, 0
        self.finished = set(finished)
        self._fresh = [portion for portion in range(count) if portion not in self.finished]
        self._holders: dict[int, set[str]] = defaultdict(set)

    @property
    def is_done(self) -> bool:
        """Whether every portion has a result."""
        return len(self.finished) == self.count

    def next(self, worker: str) -> int | None:
        """A portion for an idle worker, or None if every one that is left is with it already."""
        if self._fresh:
            portion = self._fresh.pop(0)
        else:
            late = [p for p in self._holders if p not in self.finished and worker not in self._holders[p]]
            if not late:
                return None
            portion = min(late, key=lambda one: (len(self._holders[one]), one))
            self.duplicated += bool(self._holders[portion])
        self._holders[portion].add(worker)
        return portion

    def finish(self, portion: int) -> bool:
        """Whether a result of a portion is the first, and counts."""
        first = portion in range(self.count) and portion not in self.finished
        if first:
            self.finished.add(portion)
            self._fresh = [fresh for fresh in self._fresh if fresh != portion]
        return first

    def leave(self, worker: str) -> None:
        """A worker is gone: what only it had is handed out again."""
        for portion, holders in self._holders.items():
            holders.discard(worker)
            if not holders and portion not in self.finished and portion not in self._fresh:
                self._fresh.append(portion)
