"""Starts the manager and the servers of a job as processes of this host.

The one idea: processes are forked and given the ``Job`` (``job.py``), and found by the view alone. A server that dies
takes nobody with it. Left out: other hosts' processes (give them the job's values and ``serve``), Trainers.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.transport.keys import CurveKeys
from lightning_parallel.parameter_server.transport.memory import keep_freed_memory
from lightning_parallel.parameter_server.transport.shared_files import in_memory, make_folder, remove, sweep
from lightning_parallel.parameter_server.transport.zeromq import endpoint_in

_fork = multiprocessing.get_context("fork")


@dataclass
class Launch:
    """The processes of a job on this host; ends them all when it is left.

    Args:
        job: made by ``launch``.
        locks: on the job's folders, see ``make_folder``.
        processes: by name.
    """

    job: Job
    locks: list[int]
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    def start_server(self, name: str, log: Path | None = None) -> BaseProcess:
        """Fork one more server."""
        return self._fork(name, self.job.serve, (name, log))

    def start_manager(self) -> BaseProcess:
        """Fork the manager, the first one or one after it."""
        return self._fork(MANAGER, self.job.manage, removes=True)

    def _fork(self, name: str, target: object, args: tuple[object, ...] = (), removes: bool = False) -> BaseProcess:
        folder = self.job.folder if removes else None
        process = _fork.Process(target=_child, args=(os.getpid(), folder, target, *args), name=name, daemon=True)
        process.start()
        self.processes[name] = process
        return process

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()
        remove(self.job.folder)
        while self.locks:
            os.close(self.locks.pop())


def launch(
    rules: Rules,
    num_servers: int = 1,
    num_workers: int = 1,
    host: str = "",
    port: int = 0,
    slab_bytes: int = 0,
    log: Path | None = None,
    colocated: bool = False,
    keys: CurveKeys | None = None,
) -> Launch:
    """Start a job's manager and servers.

    Args:
        rules: the job's agreement.
        num_servers: servers, each a process.
        num_workers: workers that the start waits for; ``job.join`` makes them.
        host: ``""`` for ipc; an address for TCP, with CURVE keys unless it is loopback.
        port: of the manager, with ``host``.
        slab_bytes: shared memory of each process, used with ipc.
        log: folder of the servers' logs.
        colocated: start no servers; workers do, with ``job.serve_in_thread``.
        keys: made here where they are needed, if they are not given.
    """
    sweep()
    folder, lock = make_folder()
    manager = f"tcp://{host}:{port}" if host else endpoint_in(folder, MANAGER)
    if keys is None and host and not host.startswith("127.") and host != "localhost":
        keys = CurveKeys.make()
    number, token = secrets.randbits(63), secrets.token_hex(16)
    memory = None if host else in_memory(folder.name)
    shared = None if memory is None else memory[0]
    job = Job(rules, num_servers, num_workers, folder, number, token, host, manager, slab_bytes, keys, shared)
    started = Launch(job, [lock] if memory is None else [lock, memory[1]])
    started.start_manager()
    for index in range(0 if colocated else num_servers):
        started.start_server(f"s{index}", log)
    return started


def _child(parent: int, folder: Path | None, target: object, *args: object) -> None:
    _end_with(parent, folder)
    torch.set_num_threads(1)
    keep_freed_memory()
    assert callable(target)
    target(*args)


def _end_with(parent: int, folder: Path | None) -> None:
    """End when the process that started the job ends, whatever ended it.

    Args:
        parent: that process.
        folder: of the job, which this one removes then; None leaves it to another.
    """

    def end(*_: object) -> None:
        if folder is not None:
            remove(folder)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    if os.getppid() != parent:
        end()
