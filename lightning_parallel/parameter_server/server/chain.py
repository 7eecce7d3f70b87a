"""One range on one server: its place in the chain of servers that hold it.

    worker --Push--> head --Append--> middle --Append--> tail --Ack, Rows--> worker
                       <---------------Committed-----------|

The one idea: entries travel from the head to the tail, in order; a server keeps what it passed on until the tail has
it, and sends it again to whoever comes after it in a new view. The tail tells workers, so what was acknowledged is
with all. Left out: what workers ask for (``replica.py``), who is in the chain
(``parameter_server/manager/manager.py``), views and fencing (``server.py``).

Source:
    van Renesse and Schneider, Chain Replication for Supporting High Throughput and Availability, OSDI 2004;
    Li et al., OSDI 2014, section 4.3 (aggregation before replication).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_parallel.parameter_server.messages import Ack, Append, Committed, Copied, Copy, Entry, Value, View, Want
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.server.tail import Reader

MANAGER = "manager"


class NoBoard:
    """Where nobody looks; ``transport/board.py`` has one where readers do."""

    def stamp(self, now: float) -> None:
        """Say that the server is there."""

    def show(self, key: int, view: int, part: Range | None) -> None:
        """Show a range as it is now, which every replica has; None takes it down."""

    def close(self) -> None:
        """Nobody looks any more."""


class ChainMember:
    """A range on a server, and what the server does for the others of its chain.

    Args:
        me: the server's address.
        part: the range as the server has it.
        rules: the job's agreement.
        send: takes (address, body) of what is to be sent.
        journal: takes (key, entry) before an entry is applied; a log on disk, or nothing.
        board: where readers see a tail's range without asking.
    """

    def __init__(
        self,
        me: str,
        part: Range,
        rules: Rules,
        send: Callable[[str, Any], None],
        journal: Callable[[int, Entry], None] | None = None,
        board: NoBoard | None = None,
    ) -> None:
        self.me, self.part, self.rules, self.send, self.journal = me, part, rules, send, journal
        self.board = board or NoBoard()
        self.sent: dict[int, Entry] = {}  # passed on, and not yet known to be with the tail
        self.committed = 0  # the last entry that is known here to be with all
        self.acked = dict[int, int]()  # worker -> its last push that is known here to be with all
        self.reader = Reader(part, rules)
        self.resend_at: float | None = None
        self.want_at = 0.0  # before that, what is missing is not asked for again
        self.enter(View())

    def enter(self, view: View) -> None:
        """Take one's place in a view."""
        self.view = view
        self.chain = view.chains.get(self.part.key, ())  # the servers of the range, first to last
        self.is_head = self.chain[:1] == (self.me,)  # pushes come here
        self.is_tail = self.chain[-1:] == (self.me,)  # reads come here
        self.next = self._next()  # where entries go from here
        self.board.show(self.part.key, 0, None)

    def _next(self) -> str | None:
        if self.is_tail:
            return self.view.joining.get(self.part.key)
        return self.chain[self.chain.index(self.me) + 1] if self.me in self.chain else None

    @property
    def is_current(self) -> bool:
        """Whether the first entry of this view is here, and with it all that was acknowledged in any view before."""
        return self.part.view == self.view.number

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

    def on_append(self, source: str, append: Append, now: float) -> bool:
        """Take the next entry; one that is known already is answered if it is with the tail.

        Returns:
            Whether the range can take it.
        """
        if append.entry.lsn == self.part.lsn + 1:
            if not self.part.admits(append.entry):
                return False
            self._take(append.entry, now)
        elif append.entry.lsn <= self.committed and self.me in self.chain:
            self.send(source, Committed(self.part.key, self.committed))
        elif append.entry.lsn > self.part.lsn + 1 and now >= self.want_at:
            self.want_at = now + self.rules.resend_after / 2
            self.send(source, Want(self.part.key, self.part.lsn))
        return True

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

    def on_committed(self, committed: Committed, now: float) -> bool:
        """Forget what the tail has; whether it can have so much."""
        if committed.lsn > self.part.lsn:
            return False
        for lsn in [lsn for lsn in self.sent if lsn <= committed.lsn]:
            self.acked |= {worker: mark[0] for worker, mark in self.sent.pop(lsn).marks.items()}
        self.committed = max(self.committed, committed.lsn)
        if self.committed >= self.part.lsn:  # what was never in `sent`, such as what came as a copy, is with all too
            self.acked |= self.part.seqs
        self._set_timer(now)
        return True

    def wake(self, now: float) -> None:
        """Do what time makes due."""
        if self.resend_at is not None and now >= self.resend_at:
            if self.sent.keys() >= {self.committed + 1} or self.is_tail:
                self.forward_again(now)
            else:
                self._send_copy()
                self._set_timer(now)

    @property
    def wake_at(self) -> float | None:
        """When ``wake`` is due next."""
        return self.resend_at

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
        """The tail has an entry: tell whoever waits for that. What answers a read acknowledges the reader's pushes."""
        self.committed = entry.lsn
        self._show()
        self.acked |= {worker: mark[0] for worker, mark in entry.marks.items()}
        answers = self.reader.after(entry)
        told = {worker for worker, _ in answers}
        for worker, (seq, _) in entry.marks.items():
            if worker not in told:
                self._tell(worker, Ack(self.part.key, seq))
        if entry.call is not None:
            caller, request, _, portion, *_ = entry.call
            value = 0.0 if portion >= 0 else self.part.calls[caller][1]
            self.send(caller, Value(self.part.key, request, value))
        for server in self.chain[:-1]:
            self.send(server, Committed(self.part.key, entry.lsn))
        for worker, rows in answers:
            self._tell(worker, rows)

    def _commit_all(self) -> None:
        """The tail has the first entry of the view: all that it holds is with all."""
        self.committed, self.acked = self.part.lsn, dict(self.part.seqs)
        self._show()
        for server in self.chain[:-1]:
            self.send(server, Committed(self.part.key, self.part.lsn))
        for worker in sorted(self.part.clocks):
            self._tell(worker, Ack(self.part.key, self.part.seqs[worker]))

    def _show(self) -> None:
        if self.part.seeded:
            self.board.show(self.part.key, self.view.number, self.part)

    def _tell(self, worker: int, body: Any) -> None:
        if worker in self.view.workers:
            self.send(self.view.workers[worker], body)

    def tell_copied(self) -> None:
        """The manager may put this server into the chain."""
        self.send(MANAGER, Copied(self.part.key))
