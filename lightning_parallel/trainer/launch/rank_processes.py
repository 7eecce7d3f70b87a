"""The processes of a launch: waited for and ended, whatever becomes of them; the first failure is raised, no echo.

The one idea: each has a connection of its own to this process, and its end without an answer is an answer too.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.multiprocessing as mp
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.errors import Failure
from lightning_parallel.failure.aborts import is_communication_error
from lightning_parallel.failure.heartbeat_endpoint import ENDED, lost
from lightning_parallel.trainer.failure.reports import end_in_failure, exit_hint

_LOOK_S = 0.2
_TERMINATE_S = 1.5
_SIGTERM_S = 25.0
LAST_WORDS_S = 15.0


class RankProcesses:
    """The ranks' processes and what they answered.

    Args:
        start_method: "fork" or "spawn".
        count: how many.
        main: what each runs: called with its rank, the job, and the connection on which it sends
            ``pickle.dumps((True, answer))``, or ``pickle.dumps((False, failure.to_bytes()))`` and after it, before it
            ends, what it was told to do of a failure, for which it has `LAST_WORDS_S` if it was connected.
        job: further arguments.
    """

    duplex = False  # whether processes hear something, too

    def __init__(self, start_method: str, count: int, main: Callable[..., None], job: tuple) -> None:
        self._context: Any = mp.get_context(start_method)
        self._main, self._job = main, job
        self.processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        self._answers: dict[int, Any] = {}
        self._telling: set[int] = set()  # ranks that have told of a failure
        self._silent: list[int] = []  # ranks that have ended without a word, in the order in which they did
        self._failures: list[Failure] = []  # in the order in which they came
        self._deadline, self._terminated = float("inf"), False
        self._given_up: set[int] = set()
        try:
            for rank in range(count):
                process, _ = self._spawn(rank, self._main)
                self.processes.append(process)
        except BaseException:
            self.end()
            raise

    def _spawn(self, rank: int, main: Callable[..., None]) -> tuple[Any, Connection]:
        """Start one process of a rank; it, and the connection to it."""
        ours, theirs = self._context.Pipe(self.duplex)
        process = self._context.Process(target=main, args=(rank, *self._job, theirs), daemon=False)
        process.start()
        theirs.close()
        self._pipes[ours] = rank
        return process, ours

    def wait(self, patience_s: float) -> Any:
        """What rank 0 answered, once all ranks have; or the exception of the run."""
        open_pipes = dict(self._pipes)
        while open_pipes and time.monotonic() < self._deadline:
            for pipe in wait(list(open_pipes), timeout=_LOOK_S):
                assert isinstance(pipe, Connection)
                if not self._read(pipe, open_pipes.pop(pipe)):
                    self._deadline = min(self._deadline, time.monotonic() + patience_s)
        if self._terminated:
            raise told_to_end()
        if len(self._answers) < len(self.processes):
            self.await_ends()
            self._raise()
        return self._answers[0]

    def await_ends(self) -> None:
        """After a failure: let ranks that have told of it do what `on_exception` wants of them."""
        ends = {self.processes[rank].sentinel for rank in self._telling}
        deadline = self._deadline + LAST_WORDS_S
        while ends and time.monotonic() < deadline:
            ends -= set(wait(list(ends), timeout=max(0.0, deadline - time.monotonic())))

    def _read(self, pipe: Connection, rank: int) -> bool:
        """Whether the rank answered; otherwise why not."""
        try:
            returned, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self._silent.append(rank)
            self.processes[rank].join(_TERMINATE_S)
            return False
        if returned:
            self._answers[rank] = value
        else:
            self._telling.add(rank)
            self._failures.append(Failure.from_bytes(value))
            self._give_up(self._failures[-1])
        return returned

    def _give_up(self, failure: Failure) -> None:
        """A rank that the others have lost is not waited for."""
        if failure.error is None and failure.rank is not None and ENDED not in failure.headline:
            self._given_up.add(failure.rank)
            self.processes[failure.rank].kill()

    def _raise(self) -> NoReturn:
        """The exception that the run ends with: the first that is not the echo of another.

        A rank that has told of its failure is not lost, whatever ended it behind that.
        """
        silent = self._silent_ranks()
        dead = {rank: hint for rank in silent if (hint := _killed(self.processes[rank].exitcode))}
        failure = min(self._failures, key=_is_echo, default=None)
        if failure is not None and failure.error is None and failure.rank in dead:
            self._raise_lost(failure.rank, failure.stage, dead[failure.rank])
        if dead and (failure is None or _is_echo(failure)):
            rank, hint = next(iter(dead.items()))
            self._raise_lost(rank, None, hint)
        if failure is None:
            hint = exit_hint(self.processes[silent[0]].exitcode) or "it did not end by itself"
            self._raise_lost(silent[0], None, hint)
        raise_of(failure, len(self.processes))

    def _silent_ranks(self) -> list[int]:
        """Ranks of which nobody knows more than that they have ended, in that order, and behind them who has not."""
        spoken = {*self._answers, *self._telling, *self._silent}
        ranks = [*self._silent, *(rank for rank in range(len(self.processes)) if rank not in spoken)]
        return [rank for rank in ranks if rank not in self._given_up]

    def _raise_lost(self, rank: int, stage: int | None, hint: str) -> NoReturn:
        raise_of(lost(rank, stage, f"{ENDED} ({hint})"), len(self.processes))

    @contextmanager
    def forwarded_sigterm(self) -> Iterator[None]:
        """SIGTERM to this process ends the ranks, which may still write a checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        owner = os.getpid()

        def forward(*_: object) -> None:
            if os.getpid() == owner:
                self._terminate()
            else:  # forked from here meanwhile (a server): the ranks are none of its own
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, forward)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _terminate(self) -> None:
        self._terminated = True
        self._deadline = time.monotonic() + _SIGTERM_S
        self._signal(signal.SIGTERM)

    def _signal(self, signum: int) -> None:
        for process in self.processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def end(self) -> None:
        """Leave no process behind."""
        for signum in (0, signal.SIGTERM, signal.SIGKILL):  # 0: those that have answered are about to end
            self._signal(signum)
            deadline = time.monotonic() + _TERMINATE_S
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        for pipe in self._pipes:
            pipe.close()


def raise_of(failure: Failure, world_size: int) -> NoReturn:
    """Raise a failure of ranks in the process that started them."""
    ranks = range(world_size) if failure.rank is not None else ()
    error = failure.to_error([rank for rank in ranks if rank != failure.rank])
    raise error from error.__cause__


def told_to_end() -> SIGTERMException:
    """What a process raises that was told to end, by SIGTERM."""
    error = SIGTERMException()
    end_in_failure(error)
    return error


def _is_echo(failure: Failure) -> bool:
    return failure.error is not None and is_communication_error(failure.error)


def _killed(code: int | None) -> str | None:
    return exit_hint(code) if code is not None and code < 0 else None
