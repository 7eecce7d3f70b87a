"""Vector clocks of workers: who has finished how many iterations, and the least of them.

The one idea: a worker's clock is the number of its finished iterations, and the least clock never goes back, whoever
joins or leaves. Left out: time, messages, who decides that a worker is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class VectorClock:
    """The clock of every active worker, and a floor below which nobody starts.

    Args:
        clocks: worker -> finished iterations.
        floor: the least clock while there is no worker.

    Example:
        >>> clock = VectorClock({1: 0, 2: 0})
        >>> clock.advance(1, 3), clock.advance(2, 1)
        (False, True)
        >>> clock.minimum, clock.join(7), clock.leave(2)
        (1, 1, False)
        >>> clock.minimum, clock.copy()
        (1, {1: 3, 7: 1})

    Source:
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013, section
        2.
    """

    def __init__(self, clocks: Mapping[int, int] | None = None, floor: int = 0) -> None:
        self._clocks = dict(clocks or {})
        self.floor = max(floor, min(self._clocks.values(), default=floor))

    @property
    def minimum(self) -> int:
        """The least clock of all active workers; never smaller than it was."""
        return self.floor

    @property
    def maximum(self) -> int:
        """The greatest clock of all active workers."""
        return max(self._clocks.values(), default=self.floor)

    def advance(self, worker: int, clock: int) -> bool:
        """Set a worker's clock, never back; whether the least clock moved."""
        self._clocks[worker] = max(clock, self._clocks[worker])
        return self._settle()

    def join(self, worker: int) -> int:
        """Let a worker in at the least clock, and return that."""
        return self._clocks.setdefault(worker, self.floor)

    def leave(self, worker: int) -> bool:
        """Take a worker out; whether the least clock moved, as it does when the slowest goes."""
        self._clocks.pop(worker, None)
        return self._settle()

    def _settle(self) -> bool:
        before = self.floor
        self.floor = max(before, min(self._clocks.values(), default=before))
        return self.floor > before

    def __getitem__(self, worker: int) -> int:
        return self._clocks[worker]

    def __contains__(self, worker: object) -> bool:
        return worker in self._clocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._clocks)

    def __len__(self) -> int:
        return len(self._clocks)

    def copy(self) -> dict[int, int]:
        """The clocks of all active workers."""
        return dict(self._clocks)
