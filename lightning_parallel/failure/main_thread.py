"""Does the main thread of this rank get on?

The one idea: it does while it waits for nobody, while its count of steps changes, or, where much data moves, while the
process uses its processor, but for what the watch uses itself.
"""

from __future__ import annotations

import time

from lightning_parallel.failure.patience import Moving

_COPYING = 0.02  # of a processor: who uses more is at work, who waits uses none


class MainThreadProgress:
    """For how long the main thread has stood still; asked by one thread, whose own use of the processor is no work.

    Args:
        look_s: over how long the use of the processor is looked at.
    """

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._since = time.monotonic()
        self._state: tuple[int, str | None] = (0, None)
        self._used = (self._since, 0.0)  # when processor time was looked at, and what it was

    def still(self, progress: int, waiting: str | None, now: float) -> float:
        """Seconds since the main thread last got on.

        Args:
            progress: its count of steps.
            waiting: what it waits for, None if it does not.
            now: of the monotonic clock.
        """
        state = (progress, waiting)
        if state != self._state or waiting is None or (isinstance(waiting, Moving) and self._moves(now)):
            self._state, self._since = state, now
        return now - self._since

    def _moves(self, now: float) -> bool:
        looked, before = self._used
        if now - looked < self._look_s:
            return False
        self._used = now, time.process_time() - time.thread_time()
        return self._used[1] - before > _COPYING * (now - looked)
