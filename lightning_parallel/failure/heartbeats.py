"""Who is there: rank 0 hears every rank, every rank hears rank 0, so that one that is gone, silent or stuck is found.

The one idea: the end of a connection, a silence, and "everybody waits" are the ways in which a run stops without an
exception, and one place that hears all ranks can tell all three. `HeartbeatServer` is that place (rank 0),
`HeartbeatClient` the other ranks' end of it. Both belong to the watch's thread. Left out: what is done about it
(``failure/watch.py``).
"""

import logging
import secrets
import select
import socket
import time

from torch.distributed import Store

from lightning_parallel.errors import Failure
from lightning_parallel.failure.framed_socket import FramedSocket, listen
from lightning_parallel.failure.heartbeat_endpoint import HeartbeatEndpoint, Peer
from lightning_parallel.failure.messages import Status
from lightning_parallel.handshake import SessionKeys, Unproven
from lightning_parallel.handshake import connect as prove
from lightning_parallel.handshake import listen as have_proven
from lightning_parallel.secret import SECRET, Secret
from lightning_parallel.strangers import Strangers, Waits, drive

_CONNECT_S, _AGAIN_S = 20.0, 0.05
_MOST_STRANGERS = 128
_SEALED, _OPEN = "secret", "none"  # whether rank 0 has a secret, in the store
_log = logging.getLogger(__name__)
_REMEDY = (
    "All ranks have to make the calls that they make together (barrier, all_gather, save_checkpoint, a log with"
    " sync_dist=True), and to get as many batches as the others."
)


class HeartbeatServer(HeartbeatEndpoint):
    """Rank 0's end: it hears all ranks, knows the first failure and passes it on."""

    def open(self, host: str, store: Store, key: str) -> "HeartbeatServer":
        """Listen, and say in the store where."""
        token, server = secrets.token_hex(16), listen(host)
        self._key = _key(self.secret, token)
        self._strangers = Strangers(server, self._greet, _MOST_STRANGERS + self.world_size)
        kind = _OPEN if self.secret is None else _SEALED
        store.set(key, f"{host} {server.getsockname()[1]} {token} {kind}")
        return self

    def _greet(self, stream: socket.socket) -> Waits[tuple[socket.socket, SessionKeys]]:
        """Have whoever connected prove that it knows what ranks of this run do, and is one that is not there yet."""
        session = yield from have_proven(stream, self._key)
        if not 0 < session.number < self.world_size or session.number in self.peers:
            raise Unproven(f"it says that it is rank {session.number}, which is here or is none")
        return stream, session

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
        self.learn(self.unpacked(blob), blob)

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
        self._strangers.close()
        super().close()

    def poll(self, timeout_s: float, wake: socket.socket) -> None:
        before, now = self._strangers.dropped, time.monotonic()
        super().poll(min(timeout_s, self._strangers.wait_s(now)), wake)
        for stream, session in self._strangers.advance(time.monotonic()):
            self._admit(stream, session)
        if before == 0 and self._strangers.dropped:
            _log.warning(f"The watch of rank 0 has turned a connection away: {self._strangers.last}.")

    @property
    def dropped(self) -> int:
        return self._strangers.dropped + super().dropped

    def _register(self, poller: select.poll) -> None:
        super()._register(poller)
        self._strangers.register(poller)

    def _admit(self, stream: socket.socket, session: SessionKeys) -> None:
        """A rank is there: tell it what it missed."""
        if session.number in self.peers:  # two came for it in this very moment
            stream.close()
            return
        line = FramedSocket(stream, session, self.secret is not None)
        self.peers[session.number] = peer = Peer(line, Status(session.number, None, ("", 0)), self.looked)
        peer.tell("beat", self.own)  # at once, for the case that this rank does not live until the next one
        if self.failure is not None:
            peer.tell("failure", self.packed(self.failure))
        if self.finished:
            peer.tell("bye")
        self._listen_to(peer)


class HeartbeatClient(HeartbeatEndpoint):
    """Another rank's end: it hears rank 0 alone."""

    def open(self, store: Store, key: str) -> "HeartbeatClient":
        """Connect to the hub of which the store tells.

        Raises:
            ConnectionError: it cannot be reached, or has another secret.
        """
        host, port, token, kind = store.get(key).decode().split()
        rank = self.own.rank
        if (kind == _SEALED) != (self.secret is not None):
            who = f"rank {rank} has none" if kind == _SEALED else f"rank 0 has none, but rank {rank} has"
            raise ConnectionError(f"Ranks of this run are given different secrets: {who}. {_SAME}")
        line = self._connected(host, int(port), _key(self.secret, token))
        self.peers[0] = Peer(line, Status(0, None, ("", 0)), time.monotonic())
        return self

    def _connected(self, host: str, port: int, key: bytes) -> FramedSocket:
        """A line on which both ends have proven themselves; tried anew where rank 0 had too many to look after."""
        rank, deadline = self.own.rank, time.monotonic() + _CONNECT_S
        while True:
            try:
                stream = socket.create_connection((host, port), timeout=_CONNECT_S)
            except OSError as error:
                raise ConnectionError(f"rank {rank} cannot reach rank 0's watch at {host}:{port}: {error}") from error
            try:
                stream.setblocking(False)
                session = drive(stream, prove(stream, key, rank), max(0.1, deadline - time.monotonic()))
                return FramedSocket(stream, session, self.secret is not None)
            except Unproven as error:
                stream.close()
                raise ConnectionError(
                    f"rank 0's watch at {host}:{port} is not of rank {rank}'s run. {_SAME}"
                ) from error
            except OSError as error:
                stream.close()
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"rank {rank} waited {_CONNECT_S:.0f} s for rank 0's watch at {host}:{port}: {error}"
                    ) from error
                time.sleep(_AGAIN_S)

    def judge(self, now: float) -> Failure | None:
        """Rank 0 has fallen silent."""
        return self.silence(now)

    def gone(self) -> Peer | None:
        return self.peers[0] if self.peers[0].gone_since is not None else None

    def report(self, blob: bytes) -> None:
        """Tell rank 0, which answers with the run's first failure: this one, or another."""
        self.peers[0].line.send("failure", blob)

    def part(self) -> bool:
        if not self.done:
            self.done = True
            self.peers[0].tell("done")
        return self.peers[0].done

    def alone(self) -> bool:
        return True


def _key(secret: Secret | None, token: str) -> bytes:
    """By which ranks of one run know each other.

    Without a secret it is known to whoever reaches the store; what such ends say is taken as words alone.
    """
    return (secret or Secret(token)).key("watch", token.encode())


_SAME = f"Set {SECRET} to the same text for all ranks, or for none."
