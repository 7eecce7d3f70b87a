"""Who is there: rank 0 hears every rank, every rank hears rank 0, so that one that is gone, silent or stuck is found.

The one idea: the end of a connection, a silence, and "everybody waits" are the ways in which a run stops without an
exception, and one place that hears all ranks can tell all three. `Hub` is that place (rank 0), `Spoke` the other ranks'
end of it. Both belong to the watch's thread. Left out: what is done about it (``watch.py``).
"""

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed import Store

from lightning_parallel.errors import Failure, name_of
from lightning_parallel.failure.processes import processor_seconds
from lightning_parallel.failure.wire import Line, listen

_RANK = struct.Struct("!I")
_TOKEN_BYTES = 32
_CONNECT_S = 20.0
_LONGEST_COMPUTING = 10  # a process that computes without a sign of life is given this many times `stale_s`


@dataclass(frozen=True)
class Patience:
    """How long the watch waits for what, in seconds; the defaults end every rank within 30 s of a failure.

    Args:
        beat_s: time between two signs of life.
        stale_s: a rank that was silent for so long is lost (stopped, or its host is gone).
        blocked_s: ranks that all wait for each other for so long are stuck.
        grace_s: time in which a rank may end by itself after a failure; then its connections are closed.
        exit_s: time after that; then the process ends.
        cause_s: how long a rank whose communication failed waits to hear why.
    """

    beat_s: float = 1.0
    stale_s: float = 12.0
    blocked_s: float = 10.0
    grace_s: float = 4.0
    exit_s: float = 8.0
    cause_s: float = 3.0


class Status(NamedTuple):
    """What a rank says of itself with every sign of life."""

    rank: int
    stage: int | None
    process: tuple[str, int]  # the host (with its process name space) and the process id
    waiting: str | None = None
    blocked_for: float = 0.0

    @property
    def name(self) -> str:
        return name_of(self.rank, self.stage)


@dataclass
class Peer:
    """The other end of one line."""

    line: Line
    status: Status
    heard: float
    done: bool = False  # came to the end of its run
    finished: bool = False  # said goodbye
    gone_since: float | None = None  # its connection ended without a goodbye
    unconfirmed: int = 0  # failures and goodbyes it has not confirmed
    cpu: tuple[float, float] | None = None  # when its processor time was looked at, and what it was

    def tell(self, kind: str, body: bytes | Status | None = None) -> None:
        self.unconfirmed += kind in ("failure", "bye")
        self.line.send((kind, body))

    @property
    def settled(self) -> bool:
        return self.line.closed or (self.line.flush() and self.unconfirmed == 0)


@dataclass
class Party:
    """What `Hub` and `Spoke` share: peers, the first failure, and the judgement of silence."""

    own: Status
    patience: Patience
    world_size: int
    peers: dict[int, Peer] = field(default_factory=dict)
    failure: Failure | None = None
    done: bool = False
    finished: bool = False
    looked: float = field(default_factory=time.monotonic)

    def poll(self, timeout_s: float, wake: socket.socket) -> None:
        """Wait for messages, at most so long, and take them."""
        poller = select.poll()
        for descriptor in self._descriptors():
            poller.register(descriptor, select.POLLIN)
        poller.register(wake.fileno(), select.POLLIN)
        poller.poll(timeout_s * 1000)
        with suppress(BlockingIOError):
            wake.recv(4096)
        self._excuse_own_sleep()
        for peer in list(self.peers.values()):
            self._listen_to(peer)

    def beat(self, status: Status) -> None:
        """Give a sign of life."""
        self.own = status
        for peer in self.peers.values():
            peer.tell("beat", status)

    def leave(self) -> None:
        """Say goodbye to whoever is still there."""
        self.finished = True
        for peer in self.peers.values():
            peer.tell("bye")

    def part(self) -> bool:
        """This rank has come to the end of its run: whether all have."""
        raise NotImplementedError

    def settled(self) -> bool:
        """Whether everything said has arrived."""
        return all(peer.settled for peer in self.peers.values())

    def close(self) -> None:
        for peer in self.peers.values():
            peer.line.close()

    def _descriptors(self) -> Iterable[int]:
        return [peer.line.socket.fileno() for peer in self.peers.values() if not peer.line.closed]

    def _excuse_own_sleep(self) -> None:
        """A process that was stopped itself (a suspended laptop, Ctrl-Z) must not blame those it could not hear."""
        now = time.monotonic()
        if now - self.looked > max(2 * self.patience.beat_s, self.patience.stale_s / 2):
            for peer in self.peers.values():
                peer.heard, peer.cpu = now, None
        self.looked = now

    def _listen_to(self, peer: Peer) -> None:
        if peer.line.closed:
            return
        for kind, body in peer.line.receive():
            peer.heard, peer.cpu = self.looked, None
            if kind == "beat":
                peer.status = body
            elif kind == "confirmed":
                peer.unconfirmed -= 1
            elif kind == "done":
                peer.done = True
            else:
                peer.finished |= kind == "bye"
                peer.tell("confirmed")
                if kind == "failure":
                    self.learn(Failure.from_bytes(body), body)
        if peer.line.closed and not peer.finished and peer.gone_since is None:
            peer.gone_since = self.looked

    def learn(self, failure: Failure, blob: bytes) -> None:
        """Take a failure as the run's, if it is the first."""
        if self.failure is None:
            self.failure = failure

    def report(self, blob: bytes) -> None:
        """Make this rank's failure the run's, if it is the first."""
        raise NotImplementedError

    def judge(self, now: float) -> Failure | None:
        """The failure of a rank that cannot tell of it itself, except of one that is gone."""
        raise NotImplementedError

    def gone(self) -> Peer | None:
        """The peer whose connection ended first without a goodbye."""
        raise NotImplementedError

    def alone(self) -> bool:
        """Whether nobody needs this rank's watch once it has finished itself."""
        raise NotImplementedError

    def silence(self, now: float) -> Failure | None:
        """The failure of a peer that has been silent for too long."""
        for peer in self.peers.values():
            silent_s = now - peer.heard
            if peer.finished or peer.line.closed or silent_s < self.patience.stale_s / 2:
                continue
            if not self._computes(peer, now) and silent_s >= self.patience.stale_s:
                why = f"not heard of for {silent_s:.0f} s (stopped, or its host is gone)"
                return lost(peer.status.rank, peer.status.stage, why)
        return None

    def _computes(self, peer: Peer, now: float) -> bool:
        """Whether a silent process of this host uses its processor, looked at over times of half of `stale_s`.

        Then some library holds Python's lock, which is no failure for long.
        """
        host, process = peer.status.process
        if host != self.own.process[0] or now - peer.heard > _LONGEST_COMPUTING * self.patience.stale_s:
            return False
        if peer.cpu is None or now - peer.cpu[0] >= self.patience.stale_s / 2:
            used, before = processor_seconds(process), peer.cpu
            peer.cpu = (now, used)
            return before is None or used > before[1]
        return True


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
        """Whether every rank that has not finished waits, and has for long."""
        everyone = [(self.own, self.finished)] + [(peer.status, peer.finished) for peer in self.peers.values()]
        running = [status for status, finished in everyone if not finished]
        shortest = min((status.blocked_for for status in running), default=0.0)
        if len(everyone) < self.world_size or shortest < self.patience.blocked_s:
            return None
        rows = [f"  {status.name}: {'has finished' if done else status.waiting}" for status, done in sorted(everyone)]
        headline = f"every rank has waited for another one for {shortest:.0f} s, for what will not come:"
        return Failure(None, headline="\n".join([headline, *rows]))

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


def lost(rank: int, stage: int | None, why: str) -> Failure:
    """The failure of a rank that cannot tell of it itself."""
    where = "" if stage is None else f" (stage {stage})"
    return Failure(rank, stage, headline=f"lost rank {rank}{where}: {why}")
