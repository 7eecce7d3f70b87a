"""What comes in: frames of any number of peers, put together to messages; everything else is refused and counted.

The one idea: nothing that a peer sends is believed before it is checked, and a peer has at most one message half
arrived. Refused are frames that are malformed, too large, out of order, repeated, of another job or in another's name.
Large tensors of the same host are read where they lie, and given back when nobody holds them any more.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server import wire
from lightning_parallel.parameter_server.transport.frames import Assembly, Destination, whole
from lightning_parallel.parameter_server.transport.link import FRAMES, FRESH_CREDIT, credit, weight
from lightning_parallel.parameter_server.transport.pyzmq import NOBLOCK, RCVMORE, zmq
from lightning_parallel.parameter_server.transport.slab import SlabReader
from lightning_parallel.parameter_server.wire import Header, WireError, unpack_header

RETURNED = 1 << 16  # credits that are kept for peers that take none now
HANDSHAKE_MS = 10_000  # in which whoever connects has to say who it is
REASONS = 64  # for which refused messages are counted apart
PEERS = 1024  # peers of which something half arrived is kept at most
BORROWED = (wire.BODIES.index(m.Push), wire.BODIES.index(m.Append))  # what is soon forgotten: read where it lies


class Inbox:
    """The receiving end of a process.

    Args:
        router: a socket that listens.
        job: secret number of the job.
        most: bytes that one message may have.
        counts: where refused messages are counted.
        shared: other processes' shared memory.
        borrows: pushes are read in the sender's shared memory and never copied.
        place: may know where a large tensor is wanted.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        job: int,
        most: int,
        counts: Counter[str],
        shared: SlabReader | None = None,
        borrows: bool = False,
        place: Destination = lambda outline: None,
    ) -> None:
        router.linger, router.rcvhwm, router.sndhwm = 0, 2 * FRAMES, 2 * FRAMES
        router.router_handover, router.router_mandatory = True, True
        router.maxmsgsize, router.handshake_ivl = 2 << 20, HANDSHAKE_MS
        self.router, self.job, self.most, self.counts = router, job, most, counts
        self.shared, self.borrows, self.place = shared, borrows, place
        self.assemblies: dict[bytes, Assembly] = {}
        self._last: dict[bytes, int] = {}  # number of the last message of each peer
        self._owed: Counter[bytes] = Counter()  # bytes for which a peer has had no credit yet
        self._returned: deque[tuple[bytes, int]] = deque()  # (peer, number) of messages that nobody reads any more
        self._wait = -1

    def receive(self, seconds: float) -> m.Message | None:
        """The next message, or None if none is whole in so many seconds, or after so many frames."""
        for _ in range(64):
            peer = self._peer(seconds)
            if peer is None:
                return None
            seconds = 0.0
            message = self._checked(peer)
            if message is not None:
                return message
        return None

    def _peer(self, seconds: float) -> bytes | None:
        """Who sent the next frame."""
        wait = -int(-1e3 * seconds // 1)
        try:
            if wait <= 0:
                return self.router.recv(NOBLOCK)
            if wait != self._wait:
                self.router.set(zmq.RCVTIMEO, wait)
                self._wait = wait
            return self.router.recv()
        except zmq.Again:
            return None

    def _checked(self, peer: bytes) -> m.Message | None:
        try:
            raw = self.router.recv()  # an identity never comes alone
            if self.router.get(RCVMORE):
                return self._go_on(peer, unpack_header(raw))
            content = raw[wire.HEADER.size :]
            return self._begin(peer, unpack_header(raw[: wire.HEADER.size], content), content)
        except WireError as error:
            self.refuse(str(error))
            self.assemblies.pop(peer, None)
            while self.router.get(RCVMORE):
                self.router.recv()
            return None

    def refuse(self, why: str) -> None:
        """Count a message that is not taken; of many different reasons all further ones are one."""
        name = f"refused: {why}"[:60]
        if name not in self.counts and len(self.counts) >= REASONS:
            name = "refused: for other reasons"
        self.counts["refused"] += 1
        self.counts[name] += 1

    def _check(self, header: Header) -> None:
        if header.job != self.job:
            raise WireError("of another job")

    def _begin(self, peer: bytes, header: Header, content: bytes) -> m.Message | None:
        self._check(header)
        if header.number <= self._last.get(peer, 0):
            raise WireError("a message that came before")
        if len(self.assemblies) >= PEERS:
            raise WireError("too many peers at once")
        self._last[peer] = header.number
        self.assemblies.pop(peer, None)
        self._owe(peer, weight(content))
        if header.frames == 1 and not header.flags & wire.SLAB:
            return self._named(peer, whole(header, content, self.most))
        assembly = self.assemblies[peer] = Assembly(header, content, self.most, self.place)
        return self._finished(peer, assembly)

    def _go_on(self, peer: bytes, header: Header) -> m.Message | None:
        self._check(header)
        assembly = self.assemblies.get(peer)
        if assembly is None:
            raise WireError("a frame of no message")
        place = assembly.place(header)
        if self.router.recv_into(place) != len(place) or self.router.get(RCVMORE):
            raise WireError("a frame is not as long as its header says")
        self._owe(peer, weight(place))
        return self._finished(peer, assembly)

    def _finished(self, peer: bytes, assembly: Assembly) -> m.Message | None:
        if not assembly.is_whole:
            return None
        del self.assemblies[peer]
        if assembly.is_elsewhere:
            self._fetch(peer, assembly)
        return self._named(peer, assembly.message())

    def _named(self, peer: bytes, message: m.Message) -> m.Message:
        if message.source.encode() != peer:
            raise WireError("a message in another's name")
        return message

    def _fetch(self, peer: bytes, assembly: Assembly) -> None:
        """The tensors of a message that lie in the sender's shared memory."""
        if self.shared is None:
            raise WireError("no shared memory here")
        owner, header = peer.decode(errors="replace"), assembly.header
        if self.borrows and header.op in BORROWED and len(assembly.shapes) == 1:
            tensor = self.shared.lend(owner, header.payload, *assembly.shapes[0])
            if tensor is None:
                raise WireError("no such place in shared memory")
            assembly.tensors = [tensor]
            weakref.finalize(tensor, self._returned.append, (peer, header.number))
            return
        assembly.tensors = assembly.allocate()
        if not self.shared.take(owner, header.payload, assembly.tensors):
            raise WireError("no such place in shared memory")
        self._credit(peer, header.number)

    def give_back(self) -> None:
        """Tell peers which places in their shared memory nobody here reads any more."""
        for _ in range(len(self._returned)):
            self._credit(*self._returned.popleft())

    def _owe(self, peer: bytes, count: int) -> None:
        self._owed[peer] += count
        if self._owed[peer] >= FRESH_CREDIT:
            self._credit(peer, 0)

    def _credit(self, peer: bytes, number: int) -> None:
        """Send a credit; for a peer that takes none now it is kept, for one that is gone it is not."""
        try:
            self.router.send_multipart([peer, credit(self.job, number, self._owed[peer])], zmq.NOBLOCK)
        except zmq.Again:
            if number and len(self._returned) < RETURNED:
                self._returned.append((peer, number))
            return
        except zmq.ZMQError:
            self.counts["unreachable"] += 1
        del self._owed[peer]
