"""Who is there: rank 0 hears every rank, every rank hears rank 0, so that one that is gone, silent or stuck is found.

The one idea: the end of a connection, a silence, and "everybody waits" are the ways in which a run stops without an
exception, and one place that hears all ranks can tell all three. `Hub` is that place (rank 0), `Spoke` the other ranks'
end of it. Both belong to the watch's thread. Left out: what is done about it (``watch.py``).
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

from torch.distributed import Store

from lightning_parallel.errors import Failure
from lightning_parallel.failure.party import Party, Peer, Status
from lightning_parallel.failure.wire import Line, listen

_RANK = struct.Struct("!I")
_TOKEN_BYTES = 32
_CONNECT_S = 20.0
_REMEDY = (
    "All ranks have to make the calls that they make together (barrier, all_gather, save_checkpoint, a log with"
    " sync_dist=True), and to get as many batches as the others."
)


class Hub(Party):
    """Rank 0's end: it hears all ranks, knows the first failure and passes it on."""

    def open(self, host: str, store: Store, key: str) -> "Hub":
        """Listen, and say in the store where."""
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._server, self._strangers = listen(host), list[Line]()
        store.set(key, f"{host} {self._server.getsockname()[1]} {self._token}")
        return self

    def judge(self, now: float) -> Failure | None:
        """A rank that is gone or silent, or all ranks that wait for each other."""
        return self.silence(now) or self.stuck()

    def gone(self) -> Peer | None:
        """The rank whose connection ended first without a goodbye."""
        peers = [peer for peer in self.peers.values() if peer.gone_since is not None]
        return min(peers, key=lambda peer: peer.gone_since or 0.0, default=None)

    def learn(self, failure: Failure, blob: bytes) -> None:
        if self.failure is None:
            self.failure = failure
            for peer in self.peers.values():
                peer.tell("failure", blob)

    def report(self, blob: bytes) -> None:
        """A failure of this rank itself."""
        self.learn(Failure.from_bytes(blob), blob)

    def part(self) -> bool:
        if not self.done and len(self.peers) == self.world_size - 1 and all(p.done for p in self.peers.values()):
            self.done = True
            for peer in self.peers.values():
                peer.tell("done")
        return self.done

    def settled(self) -> bool:
        return len(self.peers) == self.world_size - 1 and super().settled()

    def stuck(self) -> Failure | None:
        """Whether every rank that has not finished waits, and has for long.

        What ranks said before another one finished does not count: it may have been what they waited for.
        """
        since = self.last_left + self.patience.beat_s
        if any(not peer.finished and peer.told <= since for peer in self.peers.values()):
            return None
        everyone = [(self.own, self.finished)] + [(peer.status, peer.finished) for peer in self.peers.values()]
        running = [status for status, finished in everyone if not finished]
        shortest = min((status.blocked_for for status in running), default=0.0)
        if len(everyone) < self.world_size or shortest < self.patience.blocked_s:
            return None
        rows = [f"  {status.name}: {'has finished' if done else status.waiting}" for status, done in sorted(everyone)]
        headline = f"every rank has waited for another one for {shortest:.0f} s, for what will not come:"
        return Failure(None, headline="\n".join([headline, *rows, _REMEDY]))

    def alone(self) -> bool:
        """Whether nobody is left to pass a failure on to."""
        return len(self.peers) == self.world_size - 1 and all(
            peer.finished or peer.line.closed for peer in self.peers.values()
        )

    def close(self) -> None:
        self._server.close()
        for stranger in self._strangers:
            stranger.close()
        super().close()

    def poll(self, timeout_s: float, wake: socket.socket) -> None:
        super().poll(timeout_s, wake)
        with suppress(BlockingIOError):
            while True:
                self._strangers.append(Line(self._server.accept()[0]))
        self._strangers = [stranger for stranger in self._strangers if not self._admit(stranger)]

    def _descriptors(self) -> Iterable[int]:
        strangers = [stranger.socket.fileno() for stranger in self._strangers]
        return [*super()._descriptors(), self._server.fileno(), *strangers]

    def _admit(self, stranger: Line) -> bool:
        """Whether the matter of a new connection is settled: a rank is admitted, anybody else is turned away."""
        hello = stranger.receive_raw(_TOKEN_BYTES + _RANK.size)
        if hello is None:
            if stranger.closed:
                stranger.close()
            return stranger.closed
        if not hmac.compare_digest(hello[:_TOKEN_BYTES], self._token.encode()):
            stranger.close()
            return True
        rank = _RANK.unpack(hello[_TOKEN_BYTES:])[0]
        self.peers[rank] = peer = Peer(stranger, Status(rank, None, ("", 0)), self.looked)
        peer.tell("beat", self.own)  # at once, for the case that this rank does not live until the next one
        if self.failure is not None:
            peer.tell("failure", self.failure.to_bytes())
        if self.finished:
            peer.tell("bye")
        self._listen_to(peer)
        return True


class Spoke(Party):
    """Another rank's end: it hears rank 0 alone."""

    def open(self, store: Store, key: str) -> "Spoke":
        """Connect to the hub of which the store tells."""
        host, port, token = store.get(key).decode().split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            raise ConnectionError(
                f"rank {self.own.rank} cannot reach rank 0's watch at {host}:{port}: {error}"
            ) from error
        line = Line(connection)
        line.send_raw(token.encode() + _RANK.pack(self.own.rank))
        self.peers[0] = Peer(line, Status(0, None, ("", 0)), time.monotonic())
        return self

    def judge(self, now: float) -> Failure | None:
        """Rank 0 has fallen silent."""
        return self.silence(now)

    def gone(self) -> Peer | None:
        return self.peers[0] if self.peers[0].gone_since is not None else None

    def report(self, blob: bytes) -> None:
        """Tell rank 0, which answers with the run's first failure: this one, or another."""
        self.peers[0].line.send(("failure", blob))

    def part(self) -> bool:
        if not self.done:
            self.done = True
            self.peers[0].tell("done")
        return self.peers[0].done

    def alone(self) -> bool:
        return True
