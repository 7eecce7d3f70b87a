"""What every server's range was made of, and what of it was committed.

The one idea: a range has one history, whoever was its tail. A copy is all of a history up to one place, wherever it was
sent from; its sender may be gone when a tail first has what it made, so what a server holds is followed from
server to server: entries one by one, and copies with the history of whoever sent them.

Source:
    van Renesse and Schneider, OSDI 2004, section 3 (what the head has passed on is not lost with it).
"""

from __future__ import annotations

from operator import is_

from lightning_parallel.parameter_server import Server
from lightning_parallel.parameter_server.messages import Copy, Entry
from lightning_parallel.parameter_server.server.replica import Replica


class Watch:
    """The histories of all ranges, as entries in order: by server, and as far as a tail had them."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], list[Entry]] = {}  # by (server, range)
        self.copies: dict[int, tuple[Copy, list[Entry]]] = {}  # by id; the copy is kept, so that its id stays its own
        self.committed: dict[int, list[Entry]] = {}  # by range

    def take(self, server: str, key: int, entry: Entry) -> None:
        """A server has applied an entry."""
        history = self.held[server, key]
        history.append(entry)
        assert len(history) == entry.lsn, f"{server} has {len(history)} entries of range {key} at {entry.lsn}"

    def sent(self, server: str, copy: Copy) -> None:
        """A server has sent all of a range."""
        history = self.held[server, copy.key]
        assert len(history) == copy.numbers["lsn"], f"{server} sent another history of range {copy.key} than it has"
        self.copies[id(copy)] = copy, list(history)

    def commit(self, server: str, key: int, lsn: int) -> None:
        """A tail has everything up to an entry."""
        known, mine = self.committed.get(key, []), self.held[server, key]
        assert len(mine) == lsn, f"{server} has {len(mine)} entries of range {key} at {lsn}"
        assert all(map(is_, known, mine)), f"range {key} has two histories"
        if len(mine) > len(known):
            self.committed[key] = list(mine)

    def versions(self, key: int) -> list[dict[int, int]]:
        """Worker -> seq after every committed entry."""
        seqs, found = {}, [{}]
        for entry in self.committed.get(key, []):
            seqs = {**seqs, **{worker: seq for worker, (seq, _) in entry.marks.items() if seq}}
            found.append(seqs)
        return found


class WatchedReplica(Replica):
    """Keeps to the rule that clocks, versions and histories never go back, and tells the watch."""

    watch: Watch

    def taken(self, entry: Entry) -> None:
        self.watch.take(self.me, self.part.key, entry)
        now = (self.part.clocks.minimum, self.part.version)
        assert all(a >= b for a, b in zip(now, getattr(self, "_last", now), strict=True))
        self._last = now

    def _commit(self, entry: Entry) -> None:
        self.watch.commit(self.me, self.part.key, entry.lsn)
        super()._commit(entry)

    def _commit_all(self) -> None:
        self.watch.commit(self.me, self.part.key, self.part.lsn)
        super()._commit_all()


def watched(watch: Watch, replica_class: type[Replica] = WatchedReplica, server_class: type[Server] = Server) -> type:
    """A class of servers whose ranges are watched."""
    kind = type("WatchedReplica", (replica_class,), {"watch": watch})

    class WatchedServer(server_class):
        def _replica(self, part):
            if part.lsn == 0:
                watch.held[self.address, part.key] = []
            return kind(self.address, part, self.rules, self._send, self.journal, self.board)

        def _send(self, target, body):
            if isinstance(body, Copy):
                watch.sent(self.address, body)
            super()._send(target, body)

        def _take_copy(self, source, copy, now):
            place = self.address, copy.key
            replica, history = self.replicas.get(copy.key), watch.held.get(place, [])
            part = None if replica is None else replica.part
            watch.held[place] = list(watch.copies[id(copy)][1])  # what is committed in taking it
            super()._take_copy(source, copy, now)
            if replica is not None and replica.part is part:
                watch.held[place] = history  # it had as much

    return WatchedServer
