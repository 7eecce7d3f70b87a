"""Whether a run of a script that a worker comes to is over, and what became of it: the hub of a later one knows.

The one idea: hubs of one script's runs are found under one port by the runs' numbers; a worker that others started
again begins with the first. Left out: what it does with the answer (``past_runs.py``).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from lightning_parallel.errors import StageError
from lightning_parallel.parameter_server.trainer.coordination.hello import PAST, Introduction
from lightning_parallel.parameter_server.trainer.coordination.hosts import Hosts
from lightning_parallel.parameter_server.trainer.coordination.reception import come
from lightning_parallel.parameter_server.transport.sealed import AnyConnection
from lightning_parallel.parameter_server.transport.shared_files import temporary

_LOOK_S = 0.05


def folder() -> Path:
    """Where hubs of this host are found; only this user may enter it.

    Raises:
        PermissionError: others may.
    """
    name = f"lightning-parallel-{os.getuid()}"
    found = temporary(len(f"/{name}/65535-1000")) / name
    found.mkdir(mode=0o700, exist_ok=True)
    if found.stat().st_uid != os.getuid() or found.stat().st_mode & 0o077:
        raise PermissionError(f"{found} can be entered by others. Remove it, or set TMPDIR to a folder of your own.")
    return found


class LaterRuns:
    """Runs that come after one of a script.

    Args:
        port: of the script, see `ExternalCoordinator`.
        run: the number of the one that a worker comes to.
        hosts: where there are several.
    """

    def __init__(self, port: int, run: int, hosts: Hosts | None = None) -> None:
        self._port, self._run, self._hosts = port, run, hosts

    def past(self) -> bytes | None:
        """What became of the run, None if no later one is there; waits for nothing.

        Raises:
            StageError: nothing was kept of it.
        """
        for connect in self._hubs():
            with suppress(OSError, EOFError):  # of a run that was killed
                line = connect()
                kept: bytes | None = pickle.loads(line.recv_bytes())
                line.close()
                if kept is None:
                    raise StageError(
                        f"Run {self._run} of the script is over, and nothing was kept of it for a worker that comes"
                        " later. Use restarts= in all of its runs."
                    )
                return kept
        return None

    def await_past(self, timeout: float) -> bytes:
        """What became of the run, once a later one is there.

        Raises:
            TimeoutError: there is none in time.
            StageError: nothing was kept of it.
        """
        deadline = time.monotonic() + timeout
        while (past := self.past()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Run {self._run} of the script is over, and after {timeout} s there is no later one."
                )
            time.sleep(_LOOK_S)
        return past

    def _hubs(self) -> list[Callable[[], AnyConnection]]:
        question = Introduction(PAST, self._run)
        if self._hosts is not None:
            hosts, (run, port) = self._hosts, self._hosts.latest
            return [lambda: hosts.connect(port, question)] if run > self._run else []
        paths = {int(path.name.rpartition("-")[2]): path for path in folder().glob(f"{self._port}-*")}
        return [lambda path=path: come(path, question) for run, path in paths.items() if run > self._run]  # type: ignore[misc]


def answer(line: AnyConnection, run: int, past: Mapping[int, bytes]) -> None:
    """In the hub: say what became of a run."""
    with suppress(OSError):
        line.send_bytes(pickle.dumps(past.get(run)))
