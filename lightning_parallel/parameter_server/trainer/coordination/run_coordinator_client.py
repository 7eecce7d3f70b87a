"""A worker's line to the hub: it meets the others there, and hears there that the run has failed.

The one idea: nothing else of a run makes a worker wait for others but its reads of weights; so whoever is told of a
failure, or wants to know of one, does it here. It stands where other strategies have their watch. Left out: weights.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from lightning_parallel.errors import Failure, StageError
from lightning_parallel.parameter_server.trainer.rows.row_deals import DealPart
from lightning_parallel.parameter_server.transport.sealed import AnyConnection

JOIN, ROWS = "new workers", "the rows of dead workers"  # what all meet for, and the hub adds something to
STEP, END = "the rows of a step", "the end of a step"  # of all workers together


class RunCoordinatorClient:
    """What a worker says to the hub.

    Args:
        connection: to the hub.
        rank: of this worker.
        reports: whether failures go to the hub from here; else the launcher sends them.
        is_new: whether it joins a run that is under way; until it is let in, it meets nobody.

    Attributes:
        is_alone: whether there is no other worker; the hub then hears of a failure when all is saved that is to be.
    """

    is_alone = False

    def __init__(self, connection: AnyConnection, rank: int, reports: bool = False, is_new: bool = False) -> None:
        self.connection, self.rank, self._reports, self.is_new = connection, rank, reports, is_new
        self.failure: Failure | None = None
        self._told: BaseException | None = None  # what this process raises of it
        self.present: tuple[int, ...] = ()  # who was there when ranks met last
        self._early: list[tuple[str, Any]] = []  # heard before it was waited for

    def meet(self, what: str, value: Any = None) -> dict[int, Any]:
        """Wait until all who are still there wait for the same; their values, by rank.

        Raises:
            StageError: the run has failed meanwhile.
        """
        return {rank: pickle.loads(blob) for rank, blob in self.meet_raw(what, value).items()}

    def meet_raw(self, what: str, value: Any = None) -> dict[int, bytes]:
        """Like `meet`, with values still pickled."""
        if self.is_new and what != JOIN:
            return {self.rank: pickle.dumps(value)}
        self._say("meet", what, pickle.dumps(value))
        return self._met()

    def _met(self) -> dict[int, bytes]:
        found: dict[int, bytes] = self._hear("met")
        self.present = tuple(found)
        return found

    def step(self, batch: Any, came_to: tuple[int, int] | None, value: Any) -> dict[int, Any]:
        """Begin a step of all workers together; their values.

        Args:
            batch: this worker's, which the hub keeps for whoever does its portion.
            came_to: see `note`; from here on somebody trains on these rows.
            value: for the others.
        """
        return self.meet(STEP, (pickle.dumps(batch), came_to, value))

    def batch_of(self, rank: int) -> Any:
        """A worker's batch in the step that is under way."""
        self._say("batch", rank)
        return pickle.loads(self._hear("answer"))

    def await_end(self) -> None:
        """Say that the end of a step is waited for; waits for nothing."""
        self._say("meet", END, pickle.dumps(None))

    @property
    def has_ended(self) -> bool:
        """Whether the step is over; waits for nothing.

        Raises:
            StageError: the run has failed.
        """
        self.check()
        return any(kind == "met" for kind, _ in self._early)

    def end(self) -> dict[int, Any]:
        """What all said at the step's end."""
        return {rank: pickle.loads(blob) for rank, blob in self._met().items()}

    def ask(self, question: str, *arguments: Any) -> Any:
        """Have the hub ask the servers; see ``Hosting``."""
        self._say("ask", question, *arguments)
        return self._hear("answer")

    def deal(self, epoch: int, turn: int = 0) -> DealPart | None:
        """This worker's share of an epoch; None if new workers are to be let in before it."""
        self._say("deal", epoch, turn)
        part: DealPart | None = self._hear("answer")
        return part

    def more(self) -> list[DealPart]:
        """What dead workers left for this one."""
        self._say("more")
        parts: list[DealPart] = self._hear("answer")
        return parts

    def note(self, number: int, seq: int, part: int, batches: int) -> None:
        """Tell how far this worker comes with a push, under which number servers know it; waits for nothing."""
        self._say("note", number, seq, part, batches)

    def may_lose(self) -> None:
        """Tell that the others could go on without any rank but the first, though there are no servers."""
        self._say("may lose")

    def found(self, is_alone: bool) -> None:
        """Tell that what this worker has evaluated would be lost with it, or no longer; waits for nothing."""
        self._say("found", is_alone)

    def stuck(self, wait: int) -> None:
        """Tell that the members of this worker's island are waited for, long since; waits for nothing."""
        self._say("stuck", wait)

    def check(self) -> None:
        """Raise if the run has failed; waits for nothing.

        Raises:
            StageError: of the failure.
        """
        if self.failure is not None:
            raise self._error()
        while self.connection.poll(0):
            self._early.append(self._read())

    def part(self) -> None:
        """Wait until every rank that is still there has come to the end of its run, its last hooks included.

        Raises:
            Exception: the failure of the run, if it has failed.
        """
        if not self.is_alone:
            self.meet("the end of the run")

    def goodbye(self) -> None:
        """End in order, where no launcher does."""
        if self._reports:
            self._say(True, None)
            self.connection.close()

    # -- what a watch has ----------------------------------------------------------------------------------------------

    def report(self, error: BaseException, where: str = "") -> BaseException:
        """Make an exception the failure of the run, and return what to raise."""
        if isinstance(error, StageError) or error is self._told:
            return error
        if self.failure is None:
            text = "".join(traceback.format_exception(error))
            self.failure = Failure(self.rank, None, where, error, text)
            self._told = replace(self.failure, traceback_text="").to_error(self._others(self.rank), is_own=True)
            if self._reports and not self.is_alone:
                with suppress(OSError):  # the hub is gone, and the others know why
                    self.connection.send_bytes(pickle.dumps((False, self.failure.to_bytes())))
        return self._error()

    def cause(self, wait_s: float | None = None) -> BaseException | None:
        """The failure of the run as an exception, if there is one."""
        return None if self.failure is None else self._error()

    def blocked(self, what: str) -> AbstractContextManager[None]:
        """Nothing: who waits for ever is seen at the hub."""
        return nullcontext()

    def stop(self) -> None:
        """Nothing: the line ends with the process."""

    # -- words ---------------------------------------------------------------------------------------------------------

    def _say(self, *words: Any) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(words))
        except OSError:
            while True:  # up to what was said last before it closed: why, as a rule
                self._early.append(self._read())

    def _hear(self, kind: str) -> Any:
        while (heard := next((one for one in self._early if one[0] == kind), None)) is None:
            self._early.append(self._read())
        self._early.remove(heard)
        return heard[1]

    def _read(self) -> tuple[str, Any]:
        try:
            heard = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise StageError(f"rank {self.rank} lost its line to the launcher of the run ({error})") from error
        if heard[0] == "failed":
            self.failure = Failure.from_bytes(heard[1])
            raise self._error()
        return heard

    def _error(self) -> BaseException:
        assert self.failure is not None
        if self._told is None:
            rank = self.failure.rank
            self._told = self.failure.to_error([] if rank is None else self._others(rank))
        return self._told

    def _others(self, rank: int) -> list[int]:
        return [other for other in self.present if other != rank]


def first_of(values: Mapping[int, Any], rank: int) -> Any:
    """A rank's value; where that rank is gone, the first one's."""
    return values[rank] if rank in values else values[min(values)]
