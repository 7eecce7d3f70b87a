"""Starts the manager and the servers of a job as processes of this host.

The one idea: processes are forked and given the ``Job`` (``job.py``), and found by the view alone. A server that dies
takes nobody with it. Left out: other hosts' processes (give them the job's values and ``serve``), Trainers.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from lightning_parallel.server.chain import MANAGER
from lightning_parallel.server.job import Job
from lightning_parallel.server.rules import Rules
from lightning_parallel.server.transport.keys import Keys
from lightning_parallel.server.transport.memory import keep_freed_memory
from lightning_parallel.server.transport.zeromq import endpoint_in

_fork = multiprocessing.get_context("fork")


@dataclass
class Launch:
    """The processes of a job on this host; ends them all when it is left.

    Args:
        job: made by ``launch``.
        processes: by name.
    """

    job: Job
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    def start_server(self, name: str, log: Path | None = None) -> BaseProcess:
        """Fork one more server."""
        return self._fork(name, self.job.serve, (name, log))

    def start_manager(self) -> BaseProcess:
        """Fork the manager, the first one or one after it."""
        return self._fork(MANAGER, self.job.manage)

    def _fork(self, name: str, target: object, args: tuple[object, ...] = ()) -> BaseProcess:
        process = _fork.Process(target=_child, args=(target, *args), name=name, daemon=True)
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
        for folder in (self.job.folder, self.job.shared):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def launch(
    rules: Rules,
    num_servers: int = 1,
    num_workers: int = 1,
    host: str = "",
    port: int = 0,
    slab_bytes: int = 0,
    log: Path | None = None,
    colocated: bool = False,
    keys: Keys | None = None,
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
    folder = Path(tempfile.mkdtemp(prefix="server-"))
    os.chmod(folder, 0o700)
    manager = f"tcp://{host}:{port}" if host else endpoint_in(folder, MANAGER)
    if keys is None and host and not host.startswith("127.") and host != "localhost":
        keys = Keys.make()
    number, token = secrets.randbits(63), secrets.token_hex(16)
    shared = None if host else _in_memory(folder.name)
    job = Job(rules, num_servers, num_workers, folder, number, token, host, manager, slab_bytes, keys, shared)
    started = Launch(job)
    started.start_manager()
    for index in range(0 if colocated else num_servers):
        started.start_server(f"s{index}", log)
    return started


def _in_memory(name: str) -> Path | None:
    """A folder that no disk stands behind, where the system has such."""
    if not os.access("/dev/shm", os.W_OK):
        return None
    folder = Path("/dev/shm", name)
    folder.mkdir(mode=0o700)
    return folder


def _child(target: object, *args: object) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    assert callable(target)
    target(*args)
