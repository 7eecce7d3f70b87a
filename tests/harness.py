"""Ranks for tests: processes forked from a parent that imported torch once, and the first failure is what a test shows.

``run_ranks(fn, 2, x)`` calls ``fn(rank, x)`` on two forked processes that share a gloo group on the loopback device and
returns what they returned. ``rank_outcomes`` is the same for tests that fail on purpose: it raises nothing. Left out:
several hosts, CUDA (a forked process cannot use a CUDA context of its parent).
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.ports import ReservedPort

GROUP_TIMEOUT_S = 15.0
_fork = multiprocessing.get_context("fork")
_reserved: list[ReservedPort] = []
_children: set[int] = set()


@dataclass
class Outcome:
    """What became of one rank: a value, an error, or neither (it was killed, or it left by ``os._exit``)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    returned: bool = False
    exitcode: int | None = None
    seconds: float = float("inf")  # from the start of all ranks to the report of this one, or its end
    text: str = ""  # the traceback of `error`, or the stacks of a rank that did not end in time


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, group: bool = True
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` forked ranks and return the results in rank order.

    The error of whichever rank failed first is raised, with that rank's own traceback below it.
    """
    outcomes = rank_outcomes(fn, world_size, *args, timeout=timeout, group=group, stop_at_first_failure=True)
    failed = [outcome for outcome in outcomes if not outcome.returned]
    if failed:
        _raise(min(failed, key=lambda outcome: outcome.seconds))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    group: bool = True,
    stop_at_first_failure: bool = False,
    awaited: Collection[int] | None = None,
) -> list[Outcome]:
    """Like ``run_ranks``, for tests in which ranks fail on purpose: what became of each rank, and nothing is raised.

    Ranks that are not ``awaited`` (a stopped process) are ended once the others have.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_Rank(fn, rank, world_size, args, Path(folder), group) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + timeout, stop_at_first_failure, awaited)
        finally:
            for rank in ranks:
                rank.reap()


def imported_anew(fn: Callable[[int], Any], without: Collection[str]) -> Any:
    """Call ``fn(0)`` in a forked process in which this package was not imported yet and others are not installed.

    Lightning and torch stay imported: a new interpreter would take five seconds for them.
    """

    def run(rank: int) -> Any:
        ours = ("lightning_parallel", *without)
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
        return fn(rank)

    return run_ranks(run, 1, group=False)[0]


def said_by(error: BaseException) -> str:
    """The text of an exception, and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def free_port() -> int:
    """A TCP port of the loopback device that nobody else is given before `release_ports`."""
    reserved = ReservedPort("127.0.0.1")
    _reserved.append(reserved)
    return reserved.number


def release_ports() -> None:
    """Give back the ports of a test that has ended."""
    while _reserved:
        _reserved.pop().close()


def remember_children() -> None:
    """Take note of the child processes that are there when a test begins; `new_children` leaves them out."""
    _children.clear()
    _children.update(children_of(os.getpid()))


def new_children() -> dict[int, str]:
    """The child processes that a test has started and that have not ended, and their commands."""
    found = children_of(os.getpid()) - _children
    return {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in found}


def children_of(pid: int) -> set[int]:
    """Child processes, without the one in which Python's `spawn` tracks shared memory, and Open MPI's daemon, which
    Lightning's search for a cluster starts where mpi4py is installed."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return {pid for pid, command in commands.items() if not (b"resource_tracker" in command or b"orted" in command)}


class _Rank:
    """One forked process and the pipe it reports through."""

    def __init__(self, fn: Callable, rank: int, world: int, args: tuple, folder: Path, group: bool):
        self.outcome, self.stacks, self.started = Outcome(rank), folder / f"stacks-{rank}", time.monotonic()
        self.pipe, theirs = _fork.Pipe(duplex=False)
        store = str(folder / "store") if group else None
        self.process = _fork.Process(target=_main, args=(fn, rank, world, args, theirs, self.stacks, store))
        self.process.start()
        theirs.close()

    def read(self) -> None:
        """Take the report; a pipe that closed without one is a rank that was killed."""
        self.outcome.seconds = time.monotonic() - self.started
        try:
            self.outcome.returned, self.outcome.value, self.outcome.error, cause, self.outcome.text = pickle.loads(
                self.pipe.recv_bytes()
            )
        except EOFError:
            self.process.join(5.0)
            self.outcome.exitcode = self.process.exitcode
            self.outcome.text = self.stacks.read_text() if self.stacks.exists() else ""
        else:
            if cause is not None and self.outcome.error is not None and self.outcome.error.__cause__ is None:
                self.outcome.error.__cause__ = cause

    def abort(self) -> None:
        """Make a rank that is still running write its stacks."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGABRT)
        self.process.join(5.0)
        self.outcome.text = self.stacks.read_text() if self.stacks.exists() else ""

    def reap(self) -> None:
        """End the process whatever it does, and take its exit code."""
        self.process.join(0.0 if self.outcome.seconds == float("inf") else 2.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.outcome.exitcode = self.process.exitcode if self.outcome.exitcode is None else self.outcome.exitcode
        self.pipe.close()


def _collect(
    ranks: list[_Rank], deadline: float, stop_at_first_failure: bool, awaited: Collection[int] | None
) -> list[Outcome]:
    open_pipes = {rank.pipe: rank for rank in ranks if awaited is None or rank.outcome.rank in awaited}
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            rank.read()
            if stop_at_first_failure and not rank.outcome.returned:
                deadline = min(deadline, time.monotonic() + 0.5)  # who failed at the same moment may still say so
    for rank in open_pipes.values():
        rank.abort()
    return [rank.outcome for rank in ranks]


def _main(fn: Callable, rank: int, world: int, args: tuple, pipe: Connection, stacks: Path, store: str | None) -> None:
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # tests that are killed leave no ranks
    with open(stacks, "w") as file:
        # SIGABRT of the parent writes the stacks; a dump_traceback_later of pytest's would hang.
        faulthandler.disable()  # a Trainer in the parent has removed its handlers, and it would not set them again
        faulthandler.enable(file)
        os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            if store is not None:
                _join_group(store, rank, world)
            report = pickle.dumps((True, fn(rank, *args), None, None, ""))
        except BaseException as error:
            pipe.send_bytes(_failure(error))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        pipe.send_bytes(report)
        with suppress(Exception):
            if store is not None:
                dist.barrier()  # nobody closes a connection that another rank still reads
                dist.destroy_process_group()


def _join_group(store: str, rank: int, world: int) -> None:
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        blob = pickle.dumps((False, None, error, error.__cause__, text))
        pickle.loads(blob)
    except Exception:
        blob = pickle.dumps((False, None, RuntimeError(f"{type(error).__name__}: {error}"), None, text))
    return blob


def _raise(first: Outcome) -> NoReturn:
    if first.error is not None:
        notes = [*getattr(first.error, "__notes__", []), f"rank {first.rank} failed first:\n{first.text}"]
        first.error.__notes__ = notes  # type: ignore[attr-defined]
        raise first.error
    if first.seconds == float("inf"):
        raise TimeoutError(f"rank {first.rank} did not end in time, its stacks:\n{first.text}")
    raise ChildProcessError(f"rank {first.rank} ended without a report, exit code {first.exitcode}\n{first.text}")
