"""Where new workers of a run knock that others start (torchrun, SLURM, Kubernetes), while it goes on.

The one idea: whoever starts a worker again starts it with the rank that it had. It is taken in once that rank is gone;
until then it waits, and it is told whether it is new. One that comes to an earlier run of the script is told what
became of that. Left out: when it is let in (``parameter_server/trainer/coordination/run_coordinator.py``).
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from lightning_parallel.parameter_server.trainer.coordination.hello import PAST, WORKER
from lightning_parallel.parameter_server.trainer.coordination.later_runs import answer
from lightning_parallel.parameter_server.trainer.coordination.reception import Arrival
from lightning_parallel.parameter_server.transport.sealed import AnyConnection


class JoinListener:
    """Keeps who knocks waiting.

    Args:
        come: waits for who comes next.
        processes: of ranks on this host; that of a new worker is added.
        restarts: how many are taken in.
        past: what became of earlier runs.
    """

    def __init__(
        self,
        come: Callable[[], Arrival],
        processes: dict[int, int | None],
        restarts: int,
        past: Mapping[int, bytes],
    ) -> None:
        self._come, self._processes, self._restarts, self._past = come, processes, restarts, past
        self._waiting: dict[int, tuple[AnyConnection, int | None]] = {}
        if restarts:
            threading.Thread(target=self._listen, name="door", daemon=True).start()

    def _listen(self) -> None:
        while True:
            line, (kind, number, more) = self._come()
            if kind == PAST:
                answer(line, number, self._past)
            elif kind == WORKER and self._restarts:
                self._waiting[number] = line, cast("int | None", more)
            else:
                _refuse(line)

    def take_in(self, rank: int) -> AnyConnection | None:
        """The connection to a new worker of a rank that is gone, once it is there."""
        if not self._restarts or rank not in self._waiting:
            return None
        line, self._processes[rank] = self._waiting.pop(rank)
        self._restarts -= 1
        if not self._restarts:
            for late, _ in self._waiting.values():
                _refuse(late)
            self._waiting.clear()
        with suppress(OSError):  # it is gone again, which is seen when it is read from
            line.send_bytes(pickle.dumps(True))
        return line


def _refuse(line: AnyConnection) -> None:
    """Nobody is taken in any more."""
    with suppress(OSError):
        line.send_bytes(pickle.dumps(None))
    line.close()
