"""An end of a line between ranks: what a rank says of itself, and how silence and a lost connection are told apart.

The one idea: a sign of life every second on a connection of its own. What only one end knows (who is there, whether all
wait for each other) is left to `Hub` and `Spoke` (``roll.py``). Belongs to the watch's thread.
"""

import select
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_parallel.errors import Failure, name_of
from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.processes import end_silent, processor_seconds
from lightning_parallel.failure.wire import Line

_LONGEST_COMPUTING = 10  # a process that computes without a sign of life is given this many times `stale_s`


class Status(NamedTuple):
    """What a rank says of itself with every sign of life."""

    rank: int
    stage: int | None
    process: tuple[str, int]  # the host (with its process name space) and the process id
    waiting: str | None = None
    blocked_for: float = 0.0
    asked_by: int = -1  # the rank that was told to end, as far as this one knows
    begun: int = -1  # batches that it had begun when it heard of that
    last: int = -1  # the last batch of all, as rank 0 says

    @property
    def name(self) -> str:
        return name_of(self.rank, self.stage)


@dataclass
class Peer:
    """The other end of one line."""

    line: Line
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
    last_left: float = 0.0  # when a rank last said goodbye

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
                peer.status, peer.told = body, self.looked
            elif kind == "confirmed":
                peer.unconfirmed -= 1
            elif kind == "done":
                peer.done = True
            else:
                peer.tell("confirmed")
                if kind == "bye":
                    peer.finished, self.last_left = True, self.looked
                else:
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
