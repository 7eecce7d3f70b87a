"""A hub for workers that somebody else started (torchrun, SLURM, the script run once more): rank 0 forks it.

The one idea: the same hub in a process of its own; workers of one host find it by a socket in a folder that only this
user may enter, those of several hosts by ``hosts.py``. It is on rank 0's host.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast

from lightning_parallel.errors import StageError
from lightning_parallel.failure.heartbeat_endpoint import lost
from lightning_parallel.parameter_server.hosting import Far
from lightning_parallel.parameter_server.trainer.coordination.detached_processes import detach, open_lines
from lightning_parallel.parameter_server.trainer.coordination.hello import PAST, SERVER, WORKER, Introduction
from lightning_parallel.parameter_server.trainer.coordination.hosts import Hosts
from lightning_parallel.parameter_server.trainer.coordination.join_listener import JoinListener
from lightning_parallel.parameter_server.trainer.coordination.later_runs import LaterRuns, answer, folder
from lightning_parallel.parameter_server.trainer.coordination.reception import Arrival, Reception, come, greet, listen
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator import RunCoordinator
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import RunCoordinatorClient
from lightning_parallel.parameter_server.transport.sealed import AnyConnection

_LOOK_S, _PATIENCE_S, _AGAIN_S = 0.2, 8.0, 0.02


class RunIsOver(StageError):
    """The run that a worker comes to is over."""


class ExternalCoordinator:
    """A line to the hub of a run, which rank 0 starts.

    Args:
        rank: of this worker.
        world_size: workers.
        port: a number that the ranks of this launch share, and no other launch of this host.
        run: the how many-th of the script.
        timeout: seconds for all to come.
        island_size: workers that end together.
        hosts: where there are several.
        is_near: whether this worker is on rank 0's host.
        num_far: servers on other hosts that come, too.
        restarts: how many new workers are taken in while the run goes on.
        past: what became of earlier runs of the script, by number.

    Raises:
        TimeoutError: the hub is not there in time.
        RunIsOver: the run is over; what became of it is known where a later one has a hub.
        StageError: the run goes on already, and takes no more workers in.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        port: int,
        run: int = 1,
        timeout: float = 120.0,
        island_size: int = 1,
        hosts: Hosts | None = None,
        is_near: bool = True,
        num_far: int = 0,
        restarts: int = 0,
        past: Mapping[int, bytes] | None = None,
    ) -> None:
        path = folder() / f"{port}-{run}"
        if rank == 0:
            listener = None if hosts is None else hosts.listen(world_size + num_far, run)
            _start(path, listener, hosts, world_size, num_far, timeout, island_size, restarts, past or {})
        hello = Introduction(WORKER, rank, os.getpid() if is_near else None)
        connection = _connect(path, hello, timeout, LaterRuns(port, run, hosts), hosts)
        self.line = RunCoordinatorClient(connection, rank, reports=True, is_new=_is_new(connection, rank))
        open_lines.add(self.line.connection)
        self._end = Finalize(self, _close, (self.line,), exitpriority=1)

    def close(self) -> None:
        """End the line; the hub ends when all have."""
        self._end()


def _is_new(connection: AnyConnection, rank: int) -> bool:
    """Wait for the hub's word: whether the run goes on already."""
    try:
        answer: bool | None = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise RunIsOver(f"Rank {rank} came to a run that is over.") from error
    if answer is None:
        raise StageError(f"Rank {rank} came to a run that takes no more workers in: restarts= says how many it does.")
    return answer


def _close(line: RunCoordinatorClient) -> None:
    with suppress(Exception):
        line.goodbye()
    open_lines.discard(line.connection)
    line.connection.close()


def _start(path: Path, listener: socket.socket | None, *arguments: Any) -> None:
    """Fork the hub; it ends when all ranks' lines have."""
    path.unlink(missing_ok=True)
    detach(_serve, path, listener, *arguments)
    if listener is not None:
        listener.close()


def _connect(path: Path, hello: Introduction, timeout: float, later: LaterRuns, hosts: Hosts | None) -> AnyConnection:
    """A connection to the hub, once it is there; tried anew where it had too many to look after."""
    rank, deadline, was_there = hello.number, time.monotonic() + timeout, False
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            return come(path, hello, left) if hosts is None else hosts.connect(hosts.port, hello, left)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if rank and (was_there or later.past() is not None):
                raise RunIsOver(f"Rank {rank} came to a run that is over.") from error
            cause: OSError = error
        except OSError as error:
            cause, was_there = error, True
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} waited {timeout} s for rank 0 to start the run") from cause
        time.sleep(_AGAIN_S)


def _serve(
    path: Path,
    listener: socket.socket | None,
    hosts: Hosts | None,
    world_size: int,
    num_far: int,
    timeout: float,
    island_size: int,
    restarts: int,
    past: Mapping[int, bytes],
) -> None:
    """What the hub's process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(int(timeout) + 1)  # whoever does not come in time ends it
    try:
        expected = world_size + num_far
        if listener is None or hosts is None:
            reception = Reception(listen(path), greet, expected)
        else:
            reception = Reception(listener, hosts.greet, expected)
        lines, processes, far = _all_come(reception.next, world_size, num_far, past)
        signal.alarm(0)
        if not restarts:
            reception.close()  # what listens and takes nobody in keeps connections waiting
        door = JoinListener(reception.next, processes, restarts, past)
        kill = lambda rank: _kill(processes[rank])  # noqa: E731
        hub = RunCoordinator(lines, restart=door.take_in, island_size=island_size, kill=kill, hosts=hosts, far=far)
        try:
            _run(hub, processes)
        finally:
            hub.close()
    finally:
        path.unlink(missing_ok=True)


def _all_come(
    come: Callable[[], Arrival], world_size: int, num_far: int, past: Mapping[int, bytes]
) -> tuple[dict[AnyConnection, int], dict[int, int | None], dict[int, Far]]:
    """The lines of all workers, their processes, and servers that are on other hosts; who comes twice, came again."""
    lines: dict[int, AnyConnection] = {}
    processes: dict[int, int | None] = {}
    far: dict[int, Far] = {}
    while len(lines) < world_size or len(far) < num_far:
        line, (kind, number, more) = come()
        if kind == PAST:
            answer(line, number, past)
        elif kind == SERVER:
            far[number] = Far(cast(str, more), line)
        elif number < world_size:
            lines[number], processes[number] = line, cast("int | None", more)
            line.send_bytes(pickle.dumps(False))
    return {line: rank for rank, line in lines.items()}, processes, far


def _run(hub: RunCoordinator, processes: dict[int, int | None]) -> None:
    deadline = float("inf")
    while hub.is_busy and time.monotonic() < deadline:
        hub.turn(_LOOK_S)
        if hub.failure is not None:
            deadline = min(deadline, time.monotonic() + _PATIENCE_S)
    for rank in hub.lines.values():  # a failure that they were not told of, since they wait for something else
        if rank in hub.meeting.coming and hub.failure is None:
            continue  # the run has ended before it was let in
        hub.fail(lost(rank, None, "it did not end by itself").to_bytes())
        _kill(processes[rank])


def _kill(process: int | None) -> None:
    """End a process of this host; one of another ends when its line does."""
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
