"""One range on one server: its place in the chain of servers that hold it.

    worker --Push--> head --Append--> middle --Append--> tail --Ack, Rows--> worker
                       <---------------Committed-----------|

The one idea: entries travel from the head to the tail, in order; a server keeps what it passed on until the tail has
it, and sends it again to whoever comes after it in a new view. The tail tells workers, so what was acknowledged is
with all. Left out: who is in the chain (``manager.py``), views and fencing (``node.py``).

Source:
    van Renesse and Schneider, Chain Replication for Supporting High Throughput and Availability, OSDI 2004;
    Li et al., OSDI 2014, section 4.3 (aggregation before replication).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_parallel.server.history import Range
from lightning_parallel.server.intake import Intake
from lightning_parallel.server.messages import (
    Ack,
    Append,
    At,
    Begin,
    Call,
    Committed,
    Copied,
    Copy,
    Drained,
    Entry,
    Hold,
    Push,
    Seed,
    Value,
    View,
    Want,
)
from lightning_parallel.server.reader import Reader
from lightning_parallel.server.rules import Rules

MANAGER = "manager"


class Replica:
    """A range on a server.

    Args:
        me: the server's address.
        part: the range as the server has it.
        rules: the job's agreement.
        send: takes (address, body) of what is to be sent.
        journal: takes (key, entry) before an entry is applied; a log on disk, or nothing.
    """

    def __init__(
        self,
        me: str,
        part: Range,
        rules: Rules,
        send: Callable[[str, Any], None],
        journal: Callable[[int, Entry], None] | None = None,
    ) -> None:
        self.me, self.part, self.rules, self.send, self.journal = me, part, rules, send, journal
        self.view = View()
        self.sent: dict[int, Entry] = {}  # passed on, and not yet known to be with the tail
        self.committed = 0  # the last entry that is known here to be with all
        self.acked = dict[int, int]()  # worker -> its last push that is known here to be with all
        self.intake, self.reader = Intake(part, rules), Reader(part, rules)
        self.resend_at: float | None = None
        self.want_at = 0.0  # before that, what is missing is not asked for again
        self._held_told: tuple[int, int] | None = None

    @property
    def chain(self) -> tuple[str, ...]:
        """The servers of the range, first to last."""
        return self.view.chains.get(self.part.key, ())

    @property
    def is_head(self) -> bool:
        """Whether pushes come here."""
        return self.chain[:1] == (self.me,)

    @property
    def takes_in(self) -> bool:
        """Whether the range's history goes on here: at the head, unless its servers are about to change places."""
        return self.is_head and not self.intake.draining

    @property
    def is_tail(self) -> bool:
        """Whether reads come here."""
        return self.chain[-1:] == (self.me,)

    @property
    def next(self) -> str | None:
        """Where entries go from here."""
        if self.me not in self.chain:
            return None
        if self.is_tail:
            return self.view.joining.get(self.part.key)
        return self.chain[self.chain.index(self.me) + 1]

    @property
    def is_current(self) -> bool:
        """Whether the first entry of this view is here, and with it all that was acknowledged in any view before."""
        return self.part.view == self.view.number

    def adopt(self, view: View, now: float) -> None:
        """Take one's place in a new view and repair the chain; what was not passed on yet, workers send again."""
        self.view = view
        self._open_reader()
        self.repair(now)
        if self.is_head:
            self._enrol(now)

    def repair(self, now: float) -> None:
        """Send again what the next server may not have."""
        if self.is_tail:
            self.sent.clear()
            self._send_copy()
        self.forward_again(now)

    def _send_copy(self) -> None:
        """All of the range, to the server that joins the chain; what comes after it is kept in ``sent``."""
        if self.next is not None:
            self.send(self.next, self.part.copy())

    def forward_again(self, now: float) -> None:
        """Send all entries that are not known to be with the tail."""
        for lsn in sorted(self.sent):
            if self.next is not None:
                self.send(self.next, Append(self.part.key, self.sent[lsn]))
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        waits = self.me in self.chain and not self.is_tail and self.committed < self.part.lsn
        self.resend_at = now + self.rules.resend_after if waits else None

    def on_append(self, source: str, append: Append, now: float) -> None:
        """Take the next entry; one that is known already is answered if it is with the tail."""
        if append.entry.lsn == self.part.lsn + 1:
            self._take(append.entry, now)
        elif append.entry.lsn <= self.committed and self.me in self.chain:
            self.send(source, Committed(self.part.key, self.committed))
        elif append.entry.lsn > self.part.lsn + 1 and now >= self.want_at:
            self.want_at = now + self.rules.resend_after / 2
            self.send(source, Want(self.part.key, self.part.lsn))

    def on_want(self, source: str, want: Want) -> None:
        """The next server lacks entries: send those that are here, or all of the range."""
        if source != self.next:
            return
        if want.lsn + 1 in self.sent:
            for lsn in sorted(lsn for lsn in self.sent if lsn > want.lsn):
                self.send(source, Append(self.part.key, self.sent[lsn]))
        elif want.lsn < self.part.lsn:
            self._send_copy()

    def on_copy(self, source: str, copy: Copy, now: float) -> None:
        """Become what the server before this one in the chain is, where that is further."""
        if copy.numbers["lsn"] > self.part.lsn and not self.is_head:
            self.part = Range.of(copy, self.rules.update, self.part.memory)
            self._open_reader()
            if self.is_tail and self.is_current:
                self._commit_all()
            elif not self.is_tail:
                self._send_copy()
            self._set_timer(now)
        elif copy.numbers["lsn"] <= self.committed and self.me in self.chain:
            self.send(source, Committed(self.part.key, self.committed))

    def _open_reader(self) -> None:
        self.reader = Reader(self.part, self.rules)
        self.reader.view = self.view.number

    def on_committed(self, committed: Committed, now: float) -> None:
        """Forget what the tail has."""
        for lsn in [lsn for lsn in self.sent if lsn <= committed.lsn]:
            self.acked |= {worker: mark[0] for worker, mark in self.sent.pop(lsn).marks.items()}
        self.committed = max(self.committed, committed.lsn)
        self._set_timer(now)
        self._tell_drained()

    def on_push(self, source: str, push: Push, now: float) -> None:
        """Take a worker's push in, at the head."""
        if self.takes_in:
            answer = self.intake.take(push, self.acked.get(push.worker, 0), now)
            if answer is not None:
                self.send(source, answer)
            self.flush(now)

    def on_seed(self, seed: Seed, now: float) -> None:
        """The first weights; whoever comes later changes nothing."""
        if self.takes_in and not self.part.seeded:
            self._take(Entry(self.part.lsn + 1, seed=seed.values), now)

    def on_begin(self, begin: Begin, now: float) -> None:
        """A worker that has not pushed yet begins at a later clock than it was let in at."""
        part = self.part
        if self.takes_in and begin.worker in part.clocks and part.clocks[begin.worker] < begin.clock:
            self._take(Entry(part.lsn + 1, marks={begin.worker: (part.seqs[begin.worker], begin.clock)}), now)
            self.flush(now)

    def on_call(self, source: str, call: Call, now: float) -> None:
        """Do arithmetic once; asked again, only the answer is sent again."""
        last, value = self.part.calls.get(source, (0, 0.0))
        if self.takes_in and call.request > last:
            words = (source, call.request, *call.words)
            self._take(Entry(self.part.lsn + 1, push=call.values, call=words), now)
        elif self.takes_in and call.request == last and self.committed == self.part.lsn:
            self.send(source, Value(self.part.key, last, value))

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
        """Do what time makes due."""
        if self.is_head:
            self.flush(now)
        if self.resend_at is not None and now >= self.resend_at:
            if self.sent.keys() >= {self.committed + 1} or self.is_tail:
                self.forward_again(now)
            else:
                self._send_copy()
                self._set_timer(now)

    @property
    def wake_at(self) -> float | None:
        """When ``wake`` is due next."""
        times = [self.resend_at, self.intake.wake_at if self.is_head else None]
        return min((time for time in times if time is not None), default=None)

    def _enrol(self, now: float) -> None:
        """Begin the view: a step of the history that lets in and out whom the view does."""
        part = self.part
        joined = tuple(w for w in sorted(self.view.workers) if w not in part.clocks and w not in part.left)
        left = tuple(worker for worker in sorted(part.clocks) if worker not in self.view.workers)
        self._take(Entry(part.lsn + 1, joined=joined, left=left, view=self.view.number), now)
        self.intake = Intake(part, self.rules, self.intake.staleness)

    def _take(self, entry: Entry, now: float) -> None:
        if self.journal is not None:
            self.journal(self.part.key, entry)
        self.part.apply(entry)
        if self.next is not None:
            self.sent[entry.lsn] = entry
            self.send(self.next, Append(self.part.key, entry))
        self.taken(entry)
        if self.is_tail and entry.view == self.view.number:
            self._commit_all()
        if self.is_tail and self.is_current:
            self._commit(entry)
        if self.resend_at is None:
            self._set_timer(now)

    def taken(self, entry: Entry) -> None:
        """An entry was applied here. Workers are told by the tail, not here."""

    def _commit(self, entry: Entry) -> None:
        self.committed = entry.lsn
        self.acked |= {worker: mark[0] for worker, mark in entry.marks.items()}
        for worker, (seq, _) in entry.marks.items():
            self._tell(worker, Ack(self.part.key, seq))
        if entry.call is not None:
            request, value = self.part.calls[entry.call[0]]
            self.send(entry.call[0], Value(self.part.key, request, value))
        for server in self.chain[:-1]:
            self.send(server, Committed(self.part.key, entry.lsn))
        for worker, rows in self.reader.after(entry):
            self._tell(worker, rows)

    def _commit_all(self) -> None:
        """The tail has the first entry of the view: all that it holds is with all."""
        self.committed, self.acked = self.part.lsn, dict(self.part.seqs)
        for server in self.chain[:-1]:
            self.send(server, Committed(self.part.key, self.part.lsn))
        for worker in sorted(self.part.clocks):
            self._tell(worker, Ack(self.part.key, self.part.seqs[worker]))

    def _tell(self, worker: int, body: Any) -> None:
        if worker in self.view.workers:
            self.send(self.view.workers[worker], body)

    def _tell_drained(self) -> None:
        if self.is_head and self.intake.draining and self.committed == self.part.lsn:
            self.send(MANAGER, Drained(self.part.key))

    def tell_copied(self) -> None:
        """The manager may put this server into the chain."""
        self.send(MANAGER, Copied(self.part.key))
