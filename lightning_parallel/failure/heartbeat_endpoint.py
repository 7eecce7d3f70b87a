"""An end of a line between ranks: what a rank says of itself, and how silence and a lost connection are told apart.

The one idea: a sign of life every second on a connection of its own. What only one end knows (who is there, whether all
wait for each other) is left to `HeartbeatServer` and `HeartbeatClient` (``heartbeats.py``). Belongs to the watch's
thread.
"""

import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from lightning_parallel.errors import Failure
from lightning_parallel.failure.framed_socket import FramedSocket
from lightning_parallel.failure.messages import Malformed, Status, packed, unpacked
from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.processes import end_silent, processor_seconds
from lightning_parallel.secret import Secret

_LONGEST_COMPUTING = 10  # a process that computes without a sign of life is given this many times `stale_s`


@dataclass
class Peer:
    """The other end of one line."""

    line: FramedSocket
    status: Status
    heard: float
    told: float = 0.0  # when its status came
    done: bool = False  # came to the end of its run
    finished: bool = False  # said goodbye
    gone_since: float | None = None  # its connection ended without a goodbye
    unconfirmed: int = 0  # failures and goodbyes it has not confirmed
    cpu: tuple[float, float] | None = None  # when its processor time was looked at, and what it was

    def tell(self, kind: str, body: bytes | Status | None = None) -> None:
        self.unconfirmed += kind in ("failure", "bye")
        self.line.send(kind, body)

    @property
    def settled(self) -> bool:
        return self.line.closed or (self.line.flush() and self.unconfirmed == 0)


@dataclass
class HeartbeatEndpoint:
    """What `HeartbeatServer` and `HeartbeatClient` share: peers, the first failure, and the judgement of silence.

    Args:
        own: this rank.
        patience: how long to wait for what.
        world_size: number of ranks.
        secret: of the run; without one, exceptions are told in words.
    """

    own: Status
    patience: Patience
    world_size: int
    secret: Secret | None = None
    peers: dict[int, Peer] = field(default_factory=dict)
    failure: Failure | None = None
    done: bool = False
    finished: bool = False
    looked: float = field(default_factory=time.monotonic)
    last_left: float = 0.0  # when a rank last said goodbye

    def poll(self, timeout_s: float, wake: socket.socket) -> None:
        """Wait for messages, at most so long, and take them."""
        poller = select.poll()
        self._register(poller)
        poller.register(wake.fileno(), select.POLLIN)
        poller.poll(timeout_s * 1000)
        with suppress(BlockingIOError):
            wake.recv(4096)
        self._excuse_own_sleep()
        for peer in list(self.peers.values()):
            self._listen_to(peer)

    def packed(self, failure: Failure) -> bytes:
        """A failure in the form in which it is told here."""
        return packed(failure, self.secret is not None)

    def unpacked(self, blob: bytes) -> Failure:
        """A failure of which another rank told; see `unpacked`."""
        return unpacked(blob, self.secret is not None)

    def beat(self, status: Status) -> None:
        """Give a sign of life."""
        self.own = status
        for peer in self.peers.values():
            peer.tell("beat", status)

    def leave(self) -> None:
        """Say goodbye to whoever is still there."""
        self.finished, self.last_left = True, time.monotonic()
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

    def _register(self, poller: select.poll) -> None:
        for peer in self.peers.values():
            if not peer.line.closed:
                poller.register(peer.line.socket.fileno(), select.POLLIN)

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
        try:
            for kind, body in peer.line.receive():
                self._hear(peer, kind, body)
        except Malformed as error:
            peer.line.break_off(str(error))
        if peer.line.closed and not peer.finished and peer.gone_since is None:
            peer.gone_since = self.looked

    def _hear(self, peer: Peer, kind: str, body: bytes | Status | None) -> None:
        peer.heard, peer.cpu = self.looked, None
        if isinstance(body, Status):
            if body.rank != peer.status.rank:
                raise Malformed(f"rank {peer.status.rank} says that it is rank {body.rank}")
            peer.status, peer.told = body, self.looked
        elif kind == "confirmed":
            peer.unconfirmed -= 1
        elif kind == "done":
            peer.done = True
        else:
            peer.tell("confirmed")
            if isinstance(body, bytes):
                self.learn(self.unpacked(body), body)
            else:
                peer.finished, self.last_left = True, self.looked

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

    @property
    def dropped(self) -> int:
        """How many connections were ended since what came over them was nothing that ranks say."""
        return sum(peer.line.fault is not None for peer in self.peers.values())

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
                if peer.line.proven:  # else anybody could name a process
                    end_silent(peer.status.process, self.own.process)
                return lost(peer.status.rank, peer.status.stage, not_heard_of(silent_s))
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


ENDED = "its process ended"  # of a lost rank, where somebody else may know by which signal


def not_heard_of(seconds: float) -> str:
    """Why a rank is lost that gave no sign of life for so long."""
    return f"not heard of for {seconds:.0f} s (stopped, or its host is gone)"


def lost(rank: int, stage: int | None, why: str) -> Failure:
    """The failure of a rank that cannot tell of it itself."""
    where = "" if stage is None else f" (stage {stage})"
    return Failure(rank, stage, headline=f"lost rank {rank}{where}: {why}")
