"""Where workers without a process group meet: one process that knows who is still there.

The one idea: whoever waits for the others says what for and gives a value; once all who are still there wait for the
same, each is given all values. A worker that dies is not waited for, and that all wait for different things is seen at
once. The same process starts the run's servers and asks them. Left out: several hosts.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from lightning_parallel.errors import Failure
from lightning_parallel.failure.party import lost
from lightning_parallel.server.hosting import Hosting, host
from lightning_parallel.server.transport.session import LeaseLostError

SERVE = "the servers' start"
_log = logging.getLogger(__name__)


@dataclass
class Meeting:
    """Who is there, who waits, for what and with which value.

    Args:
        present: ranks that are awaited.

    Example:
        >>> meeting = Meeting({0, 1, 2})
        >>> meeting.arrive(0, "a", "x"), meeting.arrive(2, "a", "z")
        (None, None)
        >>> meeting.leave(1)
        {0: 'x', 2: 'z'}
        >>> meeting.arrive(0, "b", None), meeting.circle()
        (None, None)
        >>> meeting.arrive(2, "c", None), meeting.circle()
        (None, 'rank 0 waits for b; rank 2 waits for c')
    """

    present: set[int]
    waiting: dict[int, tuple[str, Any]] = field(default_factory=dict)

    def arrive(self, rank: int, what: str, value: Any) -> dict[int, Any] | None:
        """A rank waits; the values of all, if it was the last of them."""
        self.waiting[rank] = (what, value)
        return self._take()

    def leave(self, rank: int) -> dict[int, Any] | None:
        """A rank is gone; the values of all others, if it was what they waited for."""
        self.present.discard(rank)
        self.waiting.pop(rank, None)
        return self._take()

    def _take(self) -> dict[int, Any] | None:
        if not self.waiting or self.waiting.keys() != self.present or self.circle() is not None:
            return None
        values = {rank: self.waiting[rank][1] for rank in sorted(self.waiting)}
        self.waiting.clear()
        return values

    def circle(self) -> str | None:
        """What everybody waits for, where nobody can go on."""
        if self.waiting.keys() != self.present or len({what for what, _ in self.waiting.values()}) < 2:
            return None
        return "; ".join(f"rank {rank} waits for {self.waiting[rank][0]}" for rank in sorted(self.waiting))


class Hub:
    """Talks to all ranks of a run.

    Args:
        lines: the connection to each rank.
        hint: says of a rank whose connection has ended how its process did.

    Attributes:
        answers: what ranks returned in the end.
        failure: the first failure, as the bytes of a ``Failure``.
    """

    def __init__(self, lines: dict[Connection, int], hint: Callable[[int], str] = lambda rank: "killed") -> None:
        self.lines, self._hint = dict(lines), hint
        self.meeting = Meeting(set(lines.values()))
        self.answers: dict[int, Any] = {}
        self.failure: bytes | None = None
        self.hosting: Hosting | None = None

    def turn(self, timeout: float) -> None:
        """Wait at most so many seconds for something, and react to all that is there."""
        for line in wait(list(self.lines), timeout=timeout):
            assert isinstance(line, Connection)
            rank = self.lines[line]
            try:
                message = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                self._gone(line, rank)
            else:
                self._react(line, rank, *message)
        if self.failure is None and self.hosting is not None and self.lines and (why := self.hosting.lost):
            self.fail(Failure(None, headline=why).to_bytes())

    def close(self) -> None:
        """End the servers."""
        if self.hosting is not None:
            self.hosting.close()

    def _react(self, line: Connection, rank: int, kind: Any, *rest: Any) -> None:
        if kind == "meet":
            self._met(self.meeting.arrive(rank, *rest), rest[0])
        elif kind == "ask":
            assert self.hosting is not None
            self._say(rank, "answer", getattr(self.hosting, rest[0])(*rest[1:]))
        elif kind is False and rank != 0 and _is_fenced(rest[0]):
            self._leave_behind(line, rank, f"it was silent for longer than its lease{self._lease}")
        elif kind is False:
            self._end(line, rank)
            self.fail(rest[0])
            self._retire(rank)  # so that nobody is left to wait for it, and all hear of the failure
        else:
            self.answers[rank] = rest[0]
            self._end(line, rank)

    def _end(self, line: Connection, rank: int) -> None:
        del self.lines[line]
        what = next((what for what, _ in self.meeting.waiting.values()), "")
        self._met(self.meeting.leave(rank), what)

    def _gone(self, line: Connection, rank: int) -> None:
        """A rank died. The others go on, but for rank 0, which has what the run is to return."""
        hint = self._hint(rank)
        if self.failure is None and (rank == 0 or self.hosting is None):
            self.fail(lost(rank, None, f"its process ended ({hint})").to_bytes())
        self._leave_behind(line, rank, hint)

    def _leave_behind(self, line: Connection, rank: int, why: str) -> None:
        if self.failure is None:
            _log.warning(f"Worker {rank} is gone ({why}). The others go on; the rows that are its share are skipped.")
        self._retire(rank)
        self._end(line, rank)

    @property
    def _lease(self) -> str:
        return "" if self.hosting is None else f" of {self.hosting.job.rules.lease} s"

    def _retire(self, rank: int) -> None:
        if self.hosting is not None:
            self.hosting.retire(f"worker {rank}")

    def _met(self, values: dict[int, Any] | None, what: str) -> None:
        if values is None:
            circle = self.meeting.circle()
            if circle is not None:
                text = f"All workers wait, but not for the same: {circle}. Every rank has to reach the same calls."
                self.fail(Failure(None, headline=text).to_bytes())
            return
        if what == SERVE:
            values = self._start(values)
        for rank in values:
            self._say(rank, "met", values)

    def _start(self, values: dict[int, Any]) -> dict[int, Any]:
        try:
            self.hosting = host(pickle.loads(values[0]))
        except Exception as error:
            self.fail(Failure(0, where="the start of the servers", error=error).to_bytes())
            return {}
        return dict.fromkeys(values, pickle.dumps(self.hosting.job))

    def fail(self, failure: bytes) -> None:
        """Tell everybody of the first failure of the run."""
        if self.failure is None:
            self.failure = failure
            for rank in list(self.lines.values()):
                self._say(rank, "failed", failure)

    def _say(self, rank: int, *words: Any) -> None:
        for line in self._of(rank):
            with suppress(OSError):  # it died, which is seen when it is read from
                line.send_bytes(pickle.dumps(words))

    def _of(self, rank: int) -> Iterable[Connection]:
        return [line for line, other in self.lines.items() if other == rank]


def _is_fenced(failure: bytes) -> bool:
    """Whether a worker failed since servers count it for gone: it was stopped, and goes on now."""
    error = Failure.from_bytes(failure).error
    return isinstance(error, LeaseLostError) or isinstance(getattr(error, "__cause__", None), LeaseLostError)
