"""Starts workers as processes of this one, which is their hub: the death of one does not end the others.

The one idea: `ProcessLauncher` with a line in both directions. What a worker raises still ends all within seconds and
is raised here; a worker that is killed is left behind. Left out: several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

import torch.multiprocessing as mp
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.errors import Failure, StageError
from lightning_parallel.failure.roll import lost
from lightning_parallel.trainer.failures import exit_hint
from lightning_parallel.trainer.hub import Hub
from lightning_parallel.trainer.line import Line
from lightning_parallel.trainer.process_launcher import (
    _LOOK_S,
    _TERMINATE_S,
    ProcessLauncher,
    _Children,
    _rank_main,
    _with_traceback,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WorkerLauncher(ProcessLauncher):
    """Forks or spawns workers that may die.

    Args:
        strategy: its ``open_line`` (in a worker) is given the worker's end of a line.
        start_method: "fork" or "spawn".
        patience_s: how long the other workers may take to end by themselves after a failure.
    """

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function in every worker and return what rank 0 returned."""
        self._check(trainer)
        with self._port():
            states = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
            job = (self, trainer, function, args, kwargs, states)
            workers = _Workers(self._start_method, self._strategy.num_processes, job)
        self.procs = workers.processes
        try:
            with workers.forwarded_sigterm():
                output = workers.wait(self._patience_s)
        finally:
            workers.end()
        return output if trainer is None else self._take_back(output, trainer)


class _Workers(_Children):
    """The workers' processes, and the hub that they meet at."""

    def __init__(self, start_method: str, count: int, job: tuple) -> None:
        context: Any = mp.get_context(start_method)
        self.processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        self._deadline, self._terminated = float("inf"), False
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_worker_main, args=(rank, *job, theirs), daemon=False)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._pipes[ours] = rank
        except BaseException:
            self.end()
            raise
        self.hub = Hub(self._pipes, self._hint)

    def wait(self, patience_s: float) -> Any:
        """What rank 0 answered, once all workers have ended; or the exception of the run."""
        while self.hub.lines and time.monotonic() < self._deadline:
            self.hub.turn(_LOOK_S)
            if self.hub.failure is not None:
                self._deadline = min(self._deadline, time.monotonic() + patience_s)
        if self._terminated:
            raise SIGTERMException
        if self.hub.failure is None and self.hub.lines:
            rank = min(self.hub.lines.values())
            self.hub.fail(lost(rank, None, "it did not end by itself").to_bytes())
        if self.hub.failure is not None:
            self._raise_first(Failure.from_bytes(self.hub.failure))
        return self.hub.answers[0]

    def _raise_first(self, failure: Failure) -> None:
        others = [rank for rank in range(len(self.processes)) if rank != failure.rank]
        if failure.error is None:
            raise failure.to_error(others if failure.rank is not None else ())
        if not isinstance(failure.error, StageError) and failure.where:
            raise failure.to_error(others)
        raise _with_traceback(failure)

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
    launcher._strategy.open_line(Line(pipe, rank))
    _rank_main(rank, launcher, *job)
