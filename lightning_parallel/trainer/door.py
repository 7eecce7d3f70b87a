"""Where new workers of a run knock that others start (torchrun, SLURM, Kubernetes), while it goes on.

The one idea: whoever starts a worker again starts it with the rank that it had. It is taken in once that rank is gone;
until then it waits, and it is told whether it is new. Left out: when it is let in (``hub.py``).
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import suppress

from lightning_parallel.server.transport.sealed import AnyConnection

WORKER = "worker"  # says hello to the hub


class Door:
    """Keeps who knocks waiting.

    Args:
        come: gives the next connection.
        processes: of ranks on this host; that of a new worker is added.
        restarts: how many are taken in.
    """

    def __init__(self, come: Callable[[], AnyConnection], processes: dict[int, int | None], restarts: int) -> None:
        self._come, self._processes, self._restarts = come, processes, restarts
        self._waiting: dict[int, tuple[AnyConnection, int | None]] = {}
        if restarts:
            threading.Thread(target=self._listen, name="door", daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):  # the run is over
            while True:
                line = self._come()
                with suppress(EOFError, OSError):
                    kind, rank, process = pickle.loads(line.recv_bytes())
                    if kind == WORKER:
                        self._waiting[rank] = line, process

    def take_in(self, rank: int) -> AnyConnection | None:
        """The connection to a new worker of a rank that is gone, once it is there."""
        if not self._restarts or rank not in self._waiting:
            return None
        line, self._processes[rank] = self._waiting.pop(rank)
        self._restarts -= 1
        if not self._restarts:
            self._refuse()
        with suppress(OSError):  # it is gone again, which is seen when it is read from
            line.send_bytes(pickle.dumps(True))
        return line

    def _refuse(self) -> None:
        """Nobody is taken in any more."""
        for line, _ in self._waiting.values():
            line.close()
        self._waiting.clear()
