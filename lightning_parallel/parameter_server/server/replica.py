"""What workers and coordinators ask of a range: its head takes pushes and calls in, its tail answers reads.

The one idea: whoever heads the chain makes the range's history, entry by entry; the rest is the chain's business
(``chain.py``). Left out: which pushes make an entry (``head.py``), which reads may be answered (``tail.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_parallel.parameter_server.filters import decode
from lightning_parallel.parameter_server.filters.codec import fits
from lightning_parallel.parameter_server.messages import (
    At,
    Begin,
    Call,
    Committed,
    Drained,
    Entry,
    Hold,
    Pull,
    Push,
    Read,
    Seed,
    Value,
    View,
)
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.sandblaster.lbfgs import check
from lightning_parallel.parameter_server.server.chain import MANAGER, ChainMember, NoBoard
from lightning_parallel.parameter_server.server.head import Intake
from lightning_parallel.parameter_server.server.history import Range


class Replica(ChainMember):
    """A range on a server, and what the server does for workers; see ``ChainMember``."""

    def __init__(
        self,
        me: str,
        part: Range,
        rules: Rules,
        send: Callable[[str, Any], None],
        journal: Callable[[int, Entry], None] | None = None,
        board: NoBoard | None = None,
    ) -> None:
        super().__init__(me, part, rules, send, journal, board)
        self.intake = Intake(part, rules)
        self._held_told: tuple[int, int] | None = None

    @property
    def takes_in(self) -> bool:
        """Whether the range's history goes on here: at the head, unless its servers are about to change places."""
        return self.is_head and not self.intake.draining

    def adopt(self, view: View, now: float) -> None:
        """Take one's place in a new view and repair the chain; what was not passed on yet, workers send again."""
        self.enter(view)
        self._open_reader()
        self.repair(now)
        if self.is_head:
            self._enrol(now)

    def _enrol(self, now: float) -> None:
        """Begin the view: a step of the history that lets in and out whom the view does."""
        part = self.part
        joined = tuple(w for w in sorted(self.view.workers) if w not in part.clocks and w not in part.left)
        left = tuple(worker for worker in sorted(part.clocks) if worker not in self.view.workers)
        self._take(Entry(part.lsn + 1, joined=joined, left=left, view=self.view.number), now)
        self.intake = Intake(part, self.rules, self.intake.staleness)

    def on_push(self, source: str, push: Push, now: float) -> None:
        """Take a worker's push in, at the head, and the pull that came with it, if this is the tail as well."""
        if push.pull is not None:
            self.on_pull(push.pull)
        if self.takes_in:
            answer = self.intake.take(push, self.acked.get(push.worker, 0), now)
            if answer is not None:
                self.send(source, answer)
            self.flush(now)

    def on_pull(self, pull: Pull) -> None:
        """Answer a read, at the tail, now or when it may be answered."""
        if self.is_tail:
            for worker, rows in self.reader.pull(pull):
                self._tell(worker, rows)

    def on_seed(self, seed: Seed, now: float) -> None:
        """The first weights; whoever comes later changes nothing."""
        if self.takes_in and not self.part.seeded and fits(seed.values, self.part.length):
            self._take(Entry(self.part.lsn + 1, seed=seed.values), now)

    def on_begin(self, begin: Begin, now: float) -> None:
        """A worker that has not pushed yet begins at a later clock than it was let in at."""
        part = self.part
        if self.takes_in and begin.worker in part.clocks and part.clocks[begin.worker] < begin.clock:
            self._take(Entry(part.lsn + 1, marks={begin.worker: (part.seqs[begin.worker], begin.clock)}), now)
            self.flush(now)

    def on_call(self, source: str, call: Call, now: float) -> None:
        """Do arithmetic once, on a range that has its first weights; asked again, only the answer is sent again."""
        if not self.takes_in or not self.part.seeded or (call.batch > self.part.batch and call.portion >= 0):
            return
        last, value = self.part.calls.get(source, (0, 0.0))
        if call.portion >= 0:  # of a batch that is over, it does not count; one that is counted is done
            over = call.batch < self.part.batch or call.portion in self.part.counted
            last, value = call.request if over else call.request - 1, 0.0
        if call.request > last and (refusal := self._refusal(call)):
            self.send(source, Value(self.part.key, call.request, 0.0, refusal=refusal))
        elif call.request > last:
            words = (source, call.request, call.batch, call.portion, *call.words)
            self._take(Entry(self.part.lsn + 1, push=call.values, call=words), now)
        elif call.request == last and self.committed == self.part.lsn:
            self.send(source, Value(self.part.key, last, value))

    def _refusal(self, call: Call) -> str:
        """Why a call cannot be done, if it cannot."""
        if not isinstance(call.values, (Tensor, type(None))) and call.values.length != self.part.length:
            return f"values of length {call.values.length}, where the range has {self.part.length}"
        try:
            values = None if call.values is None else decode(call.values)
            check({"x": self.part.weights} | self.part.vectors, call.words, values)
        except (ValueError, RuntimeError, IndexError) as error:
            return str(error)
        return ""

    def on_read(self, source: str, read: Read) -> None:
        """Show a named vector, at the tail, once the batch has begun: until it is over the vector stays as it is."""
        vector = self.part.vectors.get(read.name)
        if self.is_tail and self.is_current and self.part.batch >= read.batch and vector is not None:
            self.send(source, Value(self.part.key, read.request, 0.0, vector.clone()))

    def on_hold(self, hold: Hold, now: float) -> None:
        """A reader asks the range to stand still."""
        if self.is_head and hold.worker in self.part.clocks:
            self.intake.hold(hold, now)
            self._held_told = None
            self.flush(now)

    def on_at(self, source: str, at: At, now: float) -> None:
        """A reader says where it wants to be answered."""
        if self.is_head:
            refusal = self.intake.release_at(at)
            if refusal is not None:
                self.send(source, refusal)
            self.flush(now)

    def on_drain(self, now: float) -> None:
        """Take in nothing more, and say when all replicas are equal."""
        if self.is_head:
            self.intake.draining = True
            self._tell_drained()

    def on_committed(self, committed: Committed, now: float) -> bool:
        can_be = super().on_committed(committed, now)
        self._tell_drained()
        return can_be

    def _tell_drained(self) -> None:
        if self.is_head and self.intake.draining and self.committed == self.part.lsn:
            self.send(MANAGER, Drained(self.part.key))

    def flush(self, now: float) -> None:
        """Make entries of all pushes that are due, and tell the reader whose turn it is."""
        if self.intake.draining:
            return
        self.intake.expire(now)
        for entry in self.intake.due(now):
            self._take(entry, now)
        held = self.intake.held()
        if held is not None and self._held_told != (held[0], held[1].request):
            self._held_told = (held[0], held[1].request)
            self._tell(*held)

    def wake(self, now: float) -> None:
        if self.is_head:
            self.flush(now)
        super().wake(now)

    @property
    def wake_at(self) -> float | None:
        due = self.intake.wake_at if self.is_head else None
        if due is None or self.resend_at is None:
            return self.resend_at if due is None else due
        return min(due, self.resend_at)
