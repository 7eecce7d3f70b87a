"""The end of a rank whose run has failed and whose main thread may be in a wait that nothing answers.

The one idea: first it has time to end by itself, then what it waits on is closed under it, then the process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable

from lightning_parallel.failure.aborts import quietly
from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.processes import whereabouts

_FLUSH_S = 1.5


class Ending:
    """What is done about a main thread after a failure.

    Args:
        patience: its ``grace_s`` and ``exit_s``.
        exit: ends the process.
    """

    def __init__(self, patience: Patience, exit: Callable[[int], object]) -> None:
        self._patience, self._exit = patience, exit
        self._aborts: list[Callable[[], object]] = []
        self.last: list[Callable[[], object]] = [_end_children]

    def add(self, abort: Callable[[], object]) -> None:
        """A function that frees a main thread; called once, in a thread of its own."""
        self._aborts.append(abort)

    def is_due(self, waited_s: float) -> bool:
        """Free the main thread if it is time; whether the process has to end, so many seconds after a failure."""
        if waited_s > self._patience.grace_s:
            aborts, self._aborts = self._aborts, []
            for abort in aborts:
                threading.Thread(target=quietly, args=(abort,), daemon=True).start()
        return waited_s > self._patience.grace_s + self._patience.exit_s

    def end(self, rank: int, why: str) -> None:
        """Say where the main thread is, then why it all ended, and end the process."""
        flush = threading.Thread(target=quietly, args=(sys.stdout.flush,), daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        text = f"rank {rank} did not end by itself{whereabouts()}; it is ended now\n{why}"
        os.write(2, text.encode())  # the main thread may hold the lock of sys.stderr
        for function in self.last:
            quietly(function)
        self._exit(1)


def _end_children() -> None:
    """A loader's workers, which wait for this process."""
    for child in multiprocessing.active_children():
        child.kill()
