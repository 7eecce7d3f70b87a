"""Which batch is the last, once one rank is told to end: the same on all, and none begins another.

The one idea: as soon as a rank hears of it, it says how many batches it has begun, and begins no more before it knows
the others' numbers. The greatest of them is the last batch of all: nobody waits for a batch that others do not begin.
The watch's threads talk, so that a main thread may be in the middle of a batch for as long as it takes. Left out: who
is told (a signal handler).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

_LOOK_S = 0.2


class LastBatch:
    """What one rank knows of it.

    Example:
        >>> last = LastBatch()
        >>> last.begin(), last.begin()
        (True, True)
        >>> last.ask(1)
        >>> last.said()
        2
        >>> last.settle([2, 3])
        >>> last.begin(), last.begin()
        (True, False)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._last: int | None = None
        self.asked_by: int | None = None  # the rank that was told to end
        self.on_last: Callable[[], object] = lambda: None  # called once this rank's last batch has begun

    @property
    def last(self) -> int:
        """The number of the last batch, counted from 1; -1 where it is not settled."""
        return -1 if self._last is None else self._last

    def said(self) -> int:
        """How many batches this rank has begun, where it is asked; else -1."""
        with self._changed:
            return -1 if self.asked_by is None else self._begun

    def begin(self, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Begin a batch, if there is to be one more; waits for the others' numbers where it is not known.

        Args:
            give_up: whether not to wait any longer, since the run fails.
        """
        with self._changed:
            while self.asked_by is not None and self._last is None and not give_up():
                self._changed.wait(_LOOK_S)
            if self._last is not None and self._begun >= self._last:
                return False
            self._begun += 1
            self._tell()
            return True

    def ask(self, rank: int) -> None:
        """A rank was told to end, and all do with it."""
        with self._changed:
            if self.asked_by is None:
                self.asked_by = rank

    def settle(self, begun: Sequence[int]) -> None:
        """The numbers of all ranks are known, or the greatest of them."""
        with self._changed:
            if self._last is None:
                self._last = max(begun)
                self._tell()
                self._changed.notify_all()

    def _tell(self) -> None:
        if self._begun == self._last:
            self.on_last()
