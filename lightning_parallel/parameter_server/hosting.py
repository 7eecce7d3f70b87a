"""Servers that begin with ranges that are there already, and answer questions of the process that started them.

The one idea: a server of a training run is the server of ``job.py`` with a line to this process, on which it is
asked (``serving.py``); whether a server is a child or on another host, all that is known of it comes on that line.
Left out: restarting servers that died, starting those of other hosts.
"""

from __future__ import annotations

import multiprocessing
import pickle
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.launcher import Launch, launch
from lightning_parallel.parameter_server.manager.ring import Ring
from lightning_parallel.parameter_server.messages import Copy
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.serving import Came, Seen, serve
from lightning_parallel.parameter_server.transport.keys import CurveKeys
from lightning_parallel.parameter_server.transport.sealed import AnyConnection
from lightning_parallel.parameter_server.worker.client import Client
from lightning_parallel.ports import ReservedPort

_ANSWER_S, _LOOK_S = 60.0, 0.02
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


class Far(NamedTuple):
    """A process on another host that waits to be told what to serve."""

    host: str
    line: AnyConnection


@dataclass
class Hosting:
    """The manager and the servers of a run; ends them all when it is left.

    Args:
        started: the manager's process, and the servers'.
        reserved: the manager's port.
    """

    started: Launch
    reserved: ReservedPort | None = None
    _lines: dict[str, AnyConnection] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)  # servers whose lines have ended
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _retiring: list[threading.Thread] = field(default_factory=list)
    _successors: list[Client] = field(default_factory=list)  # of workers that died
    _is_over: bool = False

    @property
    def job(self) -> Job:
        """What workers join."""
        return self.started.job

    def begin(self, address: str, ranges: Sequence[Range], far: Far | None = None) -> None:
        """Have a process begin to serve: one of this host, which is forked, or one that waits on another."""
        if far is not None:
            far.line.send_bytes(pickle.dumps((replace(self.job, keys=None), address, ranges)))
            self._lines[address] = far.line
            return
        ours, theirs = _fork.Pipe()
        arguments = (self.job, address, ranges, theirs)
        process = _fork.Process(target=_serve, args=arguments, name=address, daemon=True)
        process.start()
        theirs.close()
        self.started.processes[address], self._lines[address] = process, ours

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
                self._gone.add(name)
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
        self._gone |= {name for name, line in list(self._lines.items()) if _has_ended(line)}
        dead = sorted(self._gone)
        if self.started.processes[MANAGER].exitcode is not None:
            dead = [MANAGER, *dead]
        if MANAGER not in dead and (not dead or self.job.rules.replicas > 1):
            return None
        if MANAGER in dead:
            return (
                "The manager's process has ended, and without it nobody knows who takes part, whatever the replication."
                " Resume from a checkpoint."
            )
        what = " and ".join(f"server {name.partition('.')[0]}" for name in dead)
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


def host(
    beginning: Beginning, address: str = "", keys: CurveKeys | None = None, far: Mapping[int, Far] | None = None
) -> Hosting:
    """Start a manager, and servers that hold the given ranges.

    Args:
        beginning: of the job.
        address: ``""`` if workers are on this host, else that by which others reach it.
        keys: of a job whose workers are on several hosts.
        far: servers that are on other hosts, by number; the others are started here.
    """
    rules, count, far = beginning.rules, beginning.num_servers, far or {}
    reserved = ReservedPort(address) if address else None
    port = reserved.number if reserved else 0
    started = launch(rules, count, beginning.num_workers, address, port, colocated=True, keys=keys)
    hosting = Hosting(started, reserved)
    places = {f"s{index}.{secrets.token_hex(4)}": far.get(index) for index in range(count)}
    ring = Ring({address: place.host if place else "" for address, place in places.items()})
    for address, place in places.items():
        mine = [part for part in beginning.ranges if ring.holders(part.key, rules.replicas)[0] == address]
        hosting.begin(address, mine, place)
    return hosting


def _serve(job: Job, address: str, ranges: Sequence[Range], line: AnyConnection) -> None:
    """What the process of a server of this host runs."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    serve(job, address, ranges, line)


def _entries(seen: Seen) -> int:
    return seen[0]


def _has_ended(line: AnyConnection) -> bool:
    with suppress(OSError):
        ends = select.poll()
        ends.register(line.fileno(), select.POLLRDHUP)
        return bool(ends.poll(0))
    return True  # whoever saw it has closed this end, too
