"""Starts workers as processes of this one, which is their hub: the death of one does not end the others.

The one idea: `ProcessLauncher` with a line in both directions. What a worker raises still ends all within seconds and
is raised here; a worker that is killed is left behind, or another is started in its place. Left out: several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from lightning_parallel.errors import Failure
from lightning_parallel.failure.heartbeat_endpoint import lost
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator import RunCoordinator
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import RunCoordinatorClient
from lightning_parallel.parameter_server.transport.sealed import AnyConnection
from lightning_parallel.trainer.failure.reports import exit_hint
from lightning_parallel.trainer.launch.process_launcher import ProcessLauncher, _rank_main
from lightning_parallel.trainer.launch.rank_processes import _LOOK_S, _TERMINATE_S, RankProcesses, raise_of, told_to_end


class WorkerLauncher(ProcessLauncher):
    """Forks or spawns workers that may die.

    Args:
        strategy: its ``open_line`` (in a worker) is given the worker's end of a line.
        start_method: "fork" or "spawn".
        restarts: how many workers that were killed are started again, in all.
        island_size: workers that end together.
    """

    def __init__(self, strategy: Any, start_method: Any, restarts: int = 0, island_size: int = 1) -> None:
        super().__init__(strategy, start_method)
        self._restarts, self._island_size = restarts, island_size

    def _start(self, job: tuple) -> RankProcesses:
        count = self._strategy.num_processes
        return _Workers(self._start_method, count, _worker_main, job, self._restarts, self._island_size)


class _Workers(RankProcesses):
    """The workers' processes, and the hub that they meet at."""

    duplex = True

    def __init__(
        self, start_method: str, count: int, main: Callable[..., None], job: tuple, restarts: int, island_size: int
    ) -> None:
        super().__init__(start_method, count, main, job)
        self.restarts = restarts
        lines = cast(dict[AnyConnection, int], self._pipes)
        self.hub = RunCoordinator(
            lines, self._hint, self._restart, island_size, lambda rank: self.processes[rank].kill()
        )

    def _restart(self, rank: int) -> Connection | None:
        """A new process for a rank whose last one died, while any may be started."""
        if not self.restarts:
            return None
        self.restarts -= 1
        self.processes[rank], line = self._spawn(rank, _new_worker_main)
        return line

    def wait(self, patience_s: float) -> Any:
        """What rank 0 answered, once all workers have ended; or the exception of the run."""
        while self.hub.is_busy and time.monotonic() < self._deadline:
            self.hub.turn(_LOOK_S)
            if self.hub.failure is not None:
                self._deadline = min(self._deadline, time.monotonic() + patience_s)
        if self._terminated:
            raise told_to_end()
        if self.hub.failure is None and self.hub.is_busy:
            rank = min(self.hub.lines.values())
            self.hub.fail(lost(rank, None, "it did not end by itself").to_bytes())
        if self.hub.failure is not None:
            self._telling = {rank for rank in range(len(self.processes)) if rank not in self.hub.lines.values()}
            self.await_ends()
            raise_of(Failure.from_bytes(self.hub.failure), len(self.processes))
        return self.hub.answers[0]

    def _hint(self, rank: int) -> str:
        self.processes[rank].join(_TERMINATE_S)
        return exit_hint(self.processes[rank].exitcode) or "its line closed"

    def end(self) -> None:
        """Leave no process behind, servers neither."""
        super().end()
        if hasattr(self, "hub"):
            self.hub.close()


def _worker_main(rank: int, launcher: WorkerLauncher, *job: Any) -> None:
    """What a worker's process runs."""
    pipe = cast(Connection, job[-1])
    launcher._strategy.open_line(RunCoordinatorClient(pipe, rank))
    _rank_main(rank, launcher, *job)


def _new_worker_main(rank: int, launcher: WorkerLauncher, *job: Any) -> None:
    """What the process of a worker runs that joins while the others train."""
    pipe = cast(Connection, job[-1])
    launcher._strategy.open_line(RunCoordinatorClient(pipe, rank, is_new=True))
    _rank_main(rank, launcher, *job)
