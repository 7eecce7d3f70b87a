"""Servers that begin with ranges that are there already, and answer questions of the process that started them.

The one idea: a server of a training run is the server of ``launcher.py`` with a thread beside it that reads its ranges
while nothing is pushed: that is how optimizer states come into a checkpoint. It also notes in which order pushes came
in, so that the age of each is known afterwards. Left out: restarting servers that died.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.ports import ReservedPort
from lightning_parallel.server.chain import MANAGER
from lightning_parallel.server.client import Client
from lightning_parallel.server.history import Range
from lightning_parallel.server.launcher import Job, Launch, launch
from lightning_parallel.server.messages import Copy, Entry
from lightning_parallel.server.node import Server
from lightning_parallel.server.ring import Ring
from lightning_parallel.server.rules import Rules
from lightning_parallel.server.transport.keys import Keys
from lightning_parallel.server.transport.memory import keep_freed_memory

_KEPT = 1 << 18  # pushes whose order is remembered
_ANSWER_S, _LOOK_S = 60.0, 0.02
Came = tuple[int, int, int, int]  # worker, its push, whether that held anything, whether it was dropped
Seen = tuple[int, dict[int, int], tuple[int, ...]]  # entries of a range, pushes of each worker, workers that are gone
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Beginning:
    """What a job's servers start from.

    Args:
        rules: the job's agreement.
        ranges: every range as it is at first.
        num_servers: processes.
        num_workers: that the job waits for.
    """

    rules: Rules
    ranges: Sequence[Range]
    num_servers: int
    num_workers: int


@dataclass
class Hosting:
    """The manager and the servers of a run; ends them all when it is left.

    Args:
        started: the manager's process, and the servers'.
        reserved: the manager's port.
    """

    started: Launch
    reserved: ReservedPort | None = None
    _lines: dict[str, Connection] = field(default_factory=dict)
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _retiring: list[threading.Thread] = field(default_factory=list)
    _successors: list[Client] = field(default_factory=list)  # of workers that died
    _is_over: bool = False

    @property
    def job(self) -> Job:
        """What workers join."""
        return self.started.job

    def copies(self) -> dict[int, Copy]:
        """All ranges as they are while nobody pushes, by key."""
        found: dict[int, Copy] = {}
        for copies in self._ask("copies"):
            for key, copy in copies.items():
                if key not in found or copy.numbers["lsn"] > found[key].numbers["lsn"]:
                    found[key] = copy
        return found

    def order(self, since: int) -> dict[int, list[Came]]:
        """In which order pushes came into the first range: entry number -> its pushes, from an entry on."""
        found: dict[int, list[Came]] = {}
        for entries in self._ask("order", since):
            found |= entries
        return found

    def _ask(self, *question: Any) -> list[Any]:
        with self._asking:
            return list(self._answers(question))

    def _answers(self, question: tuple[Any, ...]) -> Iterator[Any]:
        for name, line in list(self._lines.items()):
            try:
                line.send_bytes(pickle.dumps(question))
                if not line.poll(_ANSWER_S):
                    raise TimeoutError(f"Server {name} did not answer in {_ANSWER_S} s.")
                yield pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                self._lines.pop(name).close()  # it died, and others have its ranges

    def retire(self, worker: str, number: int | None = None, then: Callable[[int], None] | None = None) -> None:
        """Have a worker that died counted no more, without waiting for its lease: another takes its name, and goes.

        Args:
            worker: its name.
            number: under which servers know it.
            then: called in a thread with the last of its pushes that is, and all before it are, in all ranges.
        """
        arguments = (worker, number, then or (lambda acknowledged: None))
        thread = threading.Thread(target=self._retire, args=arguments, name=f"retire {worker}", daemon=True)
        self._retiring.append(thread)
        thread.start()

    def _retire(self, worker: str, number: int | None, then: Callable[[int], None]) -> None:
        acknowledged = 0
        with suppress(Exception):  # the run ends just now, or the lease is faster
            session = self.job.join(worker, timeout=self.job.rules.lease)
            self._successors.append(session.client)
            session.client.lost = self._is_over
            session.start().close()
            acknowledged = 0 if number is None else self._came_to(number)
        then(acknowledged)

    def _came_to(self, number: int) -> int:
        """How many pushes of a worker that is being let out are in all ranges, once no more can come."""
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            found: dict[int, Seen] = {}
            for seen in self._ask("seen"):
                found |= {key: max(one, found.get(key, one), key=_entries) for key, one in seen.items()}
            if all(number in left for _, _, left in found.values()):
                return min(seqs.get(number, 0) for _, seqs, left in found.values())
            time.sleep(_LOOK_S)
        return 0

    @property
    def lost(self) -> str | None:
        """Why the job cannot go on, None while it can."""
        dead = [name for name, process in self.started.processes.items() if process.exitcode is not None]
        if MANAGER not in dead and (not dead or self.job.rules.replicas > 1):
            return None
        what = " and ".join(name if name == MANAGER else f"server {name.partition('.')[0]}" for name in dead)
        return (
            f"The process of {what} has ended, and weights with it (replication={self.job.rules.replicas}). Resume from"
            " a checkpoint; with replication=2 or more a server may die."
        )

    def close(self) -> None:
        """End all processes."""
        self._is_over = True
        if self.reserved is not None:
            self.reserved.close()
        for client in self._successors:
            client.lost = True
        for thread in self._retiring:
            thread.join(_ANSWER_S)
        for line in self._lines.values():
            line.close()
        self.started.__exit__()


def host(beginning: Beginning, address: str = "", keys: Keys | None = None) -> Hosting:
    """Start a manager, and servers that hold the given ranges.

    Args:
        beginning: of the job.
        address: ``""`` if workers are on this host, else that by which others reach it.
        keys: of a job whose workers are on several hosts.
    """
    rules, count = beginning.rules, beginning.num_servers
    reserved = ReservedPort(address) if address else None
    port = reserved.number if reserved else 0
    started = launch(rules, count, beginning.num_workers, address, port, colocated=True, keys=keys)
    hosting = Hosting(started, reserved)
    addresses = [f"s{index}.{secrets.token_hex(4)}" for index in range(count)]
    ring = Ring(addresses)
    for address in addresses:
        mine = [part for part in beginning.ranges if ring.holders(part.key, rules.replicas)[0] == address]
        ours, theirs = _fork.Pipe()
        arguments = (hosting.job, address, mine, theirs)
        process = _fork.Process(target=_serve, args=arguments, name=address, daemon=True)
        process.start()
        theirs.close()
        hosting.started.processes[address] = process
        hosting._lines[address] = ours
    return hosting


def _entries(seen: Seen) -> int:
    return seen[0]


class Notes:
    """What a server remembers of the order in which pushes came into the first range."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, list[Came]]] = deque(maxlen=_KEPT)

    def take(self, key: int, entry: Entry) -> None:
        """Note an entry; a server's journal."""
        if key == 0 and entry.pushes:
            filled, dropped = int(entry.push is not None), int(entry.dropped > 0)
            came = [(w, seq, filled or dropped, dropped) for w, (seq, _) in sorted(entry.marks.items())]
            self._entries.append((entry.lsn, came))

    def since(self, lsn: int) -> dict[int, list[Came]]:
        """The entries after one."""
        with_newest_first = itertools.takewhile(lambda entry: entry[0] > lsn, reversed(self._entries))
        return dict(reversed(list(with_newest_first)))


def _serve(job: Job, address: str, ranges: Sequence[Range], line: Connection) -> None:
    """What a server's process runs."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    torch.set_num_threads(1)
    keep_freed_memory()
    notes = Notes()
    mine = {part.key: part for part in ranges}
    server = Server(address, job.rules, job.token, ranges=mine, journal=notes.take, board=job.board(address))
    node = job.node(server)
    threading.Thread(target=_answer, args=(server, notes, line), name="answers", daemon=True).start()
    node.send(server.start(node.now()))
    node.run(until=lambda: server.lost)
    node.close()
    server.board.close()


def _answer(server: Server, notes: Notes, line: Connection) -> None:
    """Answer questions until the line is closed."""
    with suppress(EOFError, OSError):
        while True:
            question = pickle.loads(line.recv_bytes())
            line.send_bytes(pickle.dumps(_answer_to(question, server, notes)))


def _answer_to(question: tuple, server: Server, notes: Notes) -> Mapping[int, Any]:
    if question[0] == "copies":
        return {key: replica.part.copy() for key, replica in list(server.replicas.items())}
    if question[0] == "seen":
        parts = [replica.part for replica in list(server.replicas.values())]
        return {part.key: (part.lsn, dict(part.seqs), part.left) for part in parts}
    return notes.since(question[1])
