"""Where workers without a process group meet: one process that knows who is still there.

The one idea: whoever waits for the others says what for and gives a value (``rendezvous.py``). A worker that dies is
    not
waited for, its rows are dealt to the others (``parameter_server/trainer/rows/row_deals.py``), and that all wait for
different things is seen at once. The same process starts the run's servers and asks them. Left out: connections
(``run_coordinator.py``), processes.
"""

from __future__ import annotations

import logging
import pickle
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, cast

from lightning_parallel.errors import Failure
from lightning_parallel.failure.heartbeat_endpoint import lost
from lightning_parallel.parameter_server.hosting import Far, Hosting, host
from lightning_parallel.parameter_server.trainer.coordination.hosts import Hosts
from lightning_parallel.parameter_server.trainer.coordination.rendezvous import Rendezvous
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator_client import ROWS, STEP
from lightning_parallel.parameter_server.trainer.coordination.tolerated_failures import why_tolerated
from lightning_parallel.parameter_server.trainer.rows.row_deals import DealPart, Deals
from lightning_parallel.parameter_server.transport.sealed import AnyConnection


class WorkerConnections:
    """The hub's connections.

    Args:
        lines: the connection to each rank.

    Attributes:
        lines: those that have not ended.
        failure: the first failure, as the bytes of a ``Failure``.
    """

    def __init__(self, lines: Mapping[AnyConnection, int]) -> None:
        self.lines = dict(lines)
        self.failure: bytes | None = None

    def heard(self, timeout: float) -> Iterator[tuple[AnyConnection, int, tuple[Any, ...] | None]]:
        """Wait at most so many seconds; who said what, None if the line has ended."""
        for line in wait(cast(Any, list(self.lines)), timeout=timeout):
            assert isinstance(line, AnyConnection)
            if line not in self.lines:
                continue  # it ended with another of its island just now
            try:
                message: tuple[Any, ...] | None = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                message = None
            yield line, self.lines[line], message

    def say(self, rank: int, *words: Any) -> None:
        """Tell a rank something, if it is there."""
        for line in [line for line, other in self.lines.items() if other == rank]:
            with suppress(OSError):  # it died, which is seen when it is read from
                line.send_bytes(pickle.dumps(words))

    def fail(self, failure: bytes) -> None:
        """Tell everybody of the first failure of the run."""
        if self.failure is None:
            self.failure = failure
            for rank in list(self.lines.values()):
                self.say(rank, "failed", failure)


SERVE = "the servers' start"
_log = logging.getLogger(__name__)


class RunCoordinator(WorkerConnections):
    """Talks to all ranks of a run.

    Args:
        lines: the connection to each rank.
        hint: says of a rank whose connection has ended how its process did.
        restart: gives the connection to a new process for a rank that died, once there is one; else None.
        island_size: ranks that end together, one behind the other.
        kill: ends the process of a rank.
        hosts: where there are several, how they reach this one.
        far: servers that wait on other hosts, by number.

    Attributes:
        answers: what ranks returned in the end.
    """

    def __init__(
        self,
        lines: dict[AnyConnection, int],
        hint: Callable[[int], str] = lambda rank: "killed",
        restart: Callable[[int], AnyConnection | None] = lambda rank: None,
        island_size: int = 1,
        kill: Callable[[int], None] = lambda rank: None,
        hosts: Hosts | None = None,
        far: Mapping[int, Far] | None = None,
    ) -> None:
        super().__init__(lines)
        self._hint, self._restart = hint, restart
        self._island_size, self._kill, self._hosts, self._far = island_size, kill, hosts, far
        self.deals, self._numbers = Deals(), dict[int, int]()
        self._settled: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # rank, pushes that came of it
        self._unsettled = 0
        self._may_lose = False  # whether the others go on without one that dies before there are servers
        self._found: set[int] = set()  # ranks whose part of an evaluation is with nobody else
        self._vacant: set[int] = set()  # ranks that a new worker may have
        self._held: dict[int, Any] | None = None  # ranks that wait for rows of the dead
        self._batches: dict[int, bytes] = {}  # of the step that all make together
        self._same: dict[int, deque[list[DealPart]]] = defaultdict(deque)  # what an island's members are answered, too
        self.meeting = Rendezvous(set(lines.values()))
        self.answers: dict[int, Any] = {}
        self.hosting: Hosting | None = None

    def turn(self, timeout: float) -> None:
        """Wait at most so many seconds for something, and react to all that is there."""
        for line, rank, message in self.heard(timeout):
            if message is None:
                self._gone(line, rank)
            else:
                self._react(line, rank, *message)
        while not self._settled.empty():
            self._settle(*self._settled.get())
        self._fill()
        if self.failure is None and self.hosting is not None and self.lines and (why := self.hosting.lost):
            self.fail(Failure(None, headline=why).to_bytes())

    @property
    def is_busy(self) -> bool:
        """Whether somebody is there who is not just about to be let in."""
        return any(rank not in self.meeting.coming for rank in self.lines.values())

    def close(self) -> None:
        """End the servers."""
        if self.hosting is not None:
            self.hosting.close()

    def _react(self, line: AnyConnection, rank: int, kind: Any, *rest: Any) -> None:
        if kind == "meet":
            self._met(self.meeting.arrive(rank, *rest))
        elif kind == "ask":
            assert self.hosting is not None
            self.say(rank, "answer", getattr(self.hosting, rest[0])(*rest[1:]))
        elif kind == "deal":
            epoch, turn = rest
            joins = (turn, epoch) not in self.deals.members and self.meeting.coming
            self.say(rank, "answer", None if joins else self.deals.begin(rank, epoch, self.meeting.present, turn))
        elif kind == "more":
            self.say(rank, "answer", self._more(rank))
        elif kind == "batch":
            self.say(rank, "answer", self._batches[rest[0]])
        elif kind == "may lose":
            self._may_lose = True
        elif kind == "found":
            (self._found.add if rest[0] else self._found.discard)(rank)
        elif kind == "note":
            self._numbers[rank] = rest[0]
            self.deals.note(rank, *rest[1:])
        elif kind == "stuck":
            self._tell("Members of an island", self.meeting.circle_in_island(rank, rest[0], self._island(rank)))
        elif kind is False and 0 not in self._island(rank) and (why := why_tolerated(rest[0], self._lease)):
            self._leave_behind(line, rank, why)
        elif kind is False:
            del self.lines[line]
            self.fail(rest[0])  # before those who wait are told that nobody else is awaited
            self._met(self.meeting.leave(rank))
            self._retire(rank)  # so that nobody is left to wait for it, and all hear of the failure
        else:
            self.answers[rank] = rest[0]
            self._end(line, rank)

    def _end(self, line: AnyConnection, rank: int) -> None:
        del self.lines[line]
        self._met(self.meeting.leave(rank))

    def _gone(self, line: AnyConnection, rank: int) -> None:
        """A rank died. The others go on, but for rank 0, which has what the run is to return, and its island."""
        hint = self._hint(rank)
        if self.failure is None and (0 in self._island(rank) or not (self.hosting or self._may_lose)):
            self.fail(lost(rank, None, f"its process ended ({hint})").to_bytes())
        self._leave_behind(line, rank, hint)

    def _leave_behind(self, line: AnyConnection, rank: int, why: str) -> None:
        is_new = rank in self.meeting.coming
        if self.failure is None:
            dealt = "dealt to them" if self.deals.members or self._may_lose else "skipped"
            missing = " What it had evaluated or predicted, and not yet given to the others or written, is missing."
            _log.warning(
                f"Worker {rank} is gone ({why}). The others go on; the rows that are its share are {dealt}."
                f"{missing if rank in self._found else ''}"
            )
        if not is_new:
            self._retire(rank)
        self._end(line, rank)
        for other, mate in list(self.lines.items()):
            if self.failure is None and mate in self._island(rank):
                self._kill(mate)
                self._leave_behind(other, mate, f"rank {rank} of its island is")

    def _island(self, rank: int) -> range:
        first = rank - rank % self._island_size
        return range(first, first + self._island_size)

    def _more(self, rank: int) -> list[DealPart]:
        """What dead workers left for a rank; members of an island, who step together, are answered of one moment."""
        if not self._same[rank]:
            for mate in self._island(rank):
                self._same[mate].append(self.deals.more(mate))
        return self._same[rank].popleft()

    def _settle(self, rank: int, acknowledged: int) -> None:
        """A worker that died has left the servers: deal what it leaves; another may take its place."""
        self._unsettled -= 1
        for member in self._island(rank):
            self.deals.lost(member, acknowledged, self.meeting.present)
        self._vacant.add(rank)
        self._fill()
        if self._held is not None:
            values, self._held = self._held, None
            self._answer(values, ROWS)

    def _fill(self) -> None:
        """Have new workers come for ranks that are gone, to be let in at the next epoch's start."""
        for rank in sorted(self._vacant) if self.failure is None and self.deals.members else ():
            line = self._restart(rank)
            if line is not None:
                self._vacant.discard(rank)
                self.lines[line] = rank
                self.meeting.coming.add(rank)

    @property
    def _lease(self) -> str:
        return "" if self.hosting is None else f" of {self.hosting.job.rules.lease} s"

    def _retire(self, rank: int) -> None:
        if self.hosting is not None and rank == self._island(rank)[0]:
            self._unsettled += 1
            then = lambda acknowledged: self._settled.put((rank, acknowledged))  # noqa: E731
            self.hosting.retire(f"worker {rank}", self._numbers.pop(rank, None), then)

    def _met(self, values: dict[int, Any] | None) -> None:
        if values is not None:
            self._answer(values, self.meeting.met)
        else:
            self._tell("All workers", self.meeting.circle())

    def _tell(self, who: str, circle: str | None) -> None:
        if circle is not None:
            text = f"{who} wait, but not for the same: {circle}. Every rank has to reach the same calls."
            self.fail(Failure(None, headline=text).to_bytes())

    def _answer(self, values: dict[int, Any], what: str) -> None:
        if what == ROWS and self._unsettled:
            self._held = values
            return
        if what == ROWS:
            values = {rank: pickle.dumps(self.deals.more(rank)) for rank in values}
        if what == SERVE:
            values = self._start(values)
        if what == STEP:
            values = self._step(values)
        for rank in values:
            self.say(rank, "met", values)

    def _step(self, values: dict[int, Any]) -> dict[int, Any]:
        """All make a step together: from here on each one's rows are trained on, whoever dies."""
        told = {rank: pickle.loads(value) for rank, value in values.items()}
        self._batches = {rank: batch for rank, (batch, _, _) in told.items()}
        for rank, (_, came_to, _) in told.items():
            if came_to is not None:
                self.deals.note(rank, 0, *came_to)
        return {rank: pickle.dumps(value) for rank, (_, _, value) in told.items()}

    def _start(self, values: dict[int, Any]) -> dict[int, Any]:
        try:
            begins, hosts = pickle.loads(values[0]), self._hosts
            self.hosting = host(begins) if hosts is None else host(begins, hosts.address, hosts.keys, self._far)
        except Exception as error:
            self.fail(Failure(0, where="the start of the servers", error=error).to_bytes())
            return {}
        return dict.fromkeys(values, pickle.dumps(replace(self.hosting.job, keys=None)))
