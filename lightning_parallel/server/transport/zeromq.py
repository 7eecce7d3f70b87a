"""State machines in processes of their own, over pyzmq: ROUTER to listen, one DEALER to each peer.

    DEALER --frame, frame, ...--> ROUTER      at most ``WINDOW`` frames without a credit
    DEALER <------- credit ------ ROUTER

The one idea: frames are small and few are under way, so memory stays small at both ends whatever the peer does; what
cannot be sent is dropped, since the state machines send again what counts. Frames that are malformed, too large, out
of order, repeated or of another job are refused and counted. Loopback and ipc only, unless there are keys. Left out:
starting processes (``launcher.py``), waiting for results (``session.py``).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zmq

from lightning_parallel.server import messages as m
from lightning_parallel.server import wire
from lightning_parallel.server.chain import MANAGER
from lightning_parallel.server.transport.frames import Assembly, Frame, cut
from lightning_parallel.server.transport.slab import Slab, SlabReader
from lightning_parallel.server.transport.virtual import Machine
from lightning_parallel.server.wire import Header, WireError, unpack_header

WINDOW = 8
CREDIT = 255  # op of a credit
FRESH_CREDIT = 4  # frames after which a credit is sent
QUEUE = 256  # messages that wait for one peer at most
COPY_BELOW = 1 << 16  # bytes of a frame below which handing over memory costs more than a copy
SLAB_FROM = 1 << 14  # bytes from which shared memory is used
PEERS = 1024  # peers of which something half arrived is kept at most


@dataclass(frozen=True)
class Keys:
    """CURVE keys of a job, made per run; whoever has them belongs to it."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> Keys:
        """New keys."""
        return cls(*zmq.curve_keypair())

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Take only peers that know the public key."""
        socket.curve_server, socket.curve_secretkey, socket.curve_publickey = True, self.secret, self.public

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to a listener of the job."""
        socket.curve_serverkey, socket.curve_secretkey, socket.curve_publickey = self.public, self.secret, self.public


def is_local(endpoint: str) -> bool:
    """Whether only this host reaches an endpoint."""
    return endpoint.startswith(("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]"))


class Link:
    """What goes to one peer: messages that wait, the frames of the one that is on its way, credits."""

    def __init__(self, node: Node, endpoint: str) -> None:
        self.node, self.endpoint = node, endpoint
        self.queue: deque[tuple[m.Message, int, int | None]] = deque()  # (message, number, place in the slab)
        self.frames: Iterator[Frame] | None = None
        self.ready: Frame | None = None
        self.blocked = False  # the socket takes nothing now
        self._open()

    def _open(self) -> None:
        self.socket = self.node.context.socket(zmq.DEALER)
        self.socket.identity = self.node.machine.address.encode()
        self.socket.linger, self.socket.sndhwm, self.socket.immediate = 0, 2 * WINDOW, 1
        self.socket.maxmsgsize = 1 << 12
        if self.node.keys is not None:
            self.node.keys.connect(self.socket)
        self.socket.connect(self.endpoint)
        self.node.poller.register(self.socket, zmq.POLLIN)
        self.outstanding, self.heard = 0, time.monotonic()

    def close(self) -> None:
        """Drop the connection and what waits for it."""
        self.node.poller.unregister(self.socket)
        self.socket.close(0)

    def put(self, message: m.Message) -> None:
        """Queue a message; beyond the limit it is dropped."""
        if len(self.queue) >= QUEUE:
            self.node.counts["dropped"] += 1
            return
        number, offset = self.node.next_number(), None
        if self.node.slab is not None and self.endpoint.startswith("ipc://"):
            offset = self.node.into_slab(message, number)
        self.queue.append((message, number, offset))

    def push(self) -> None:
        """Send what credits and socket allow."""
        if self.outstanding >= WINDOW and time.monotonic() - self.heard > self.node.patience:
            self._start_over()
        self.blocked = False
        while self.outstanding < WINDOW and (frame := self._frame()) is not None:
            try:
                self.socket.send_multipart(frame, flags=zmq.NOBLOCK, copy=len(frame[1]) < COPY_BELOW)
            except zmq.Again:
                self.ready, self.blocked = frame, True
                return
            self.outstanding += 1
            if self.outstanding == WINDOW:
                self.heard = time.monotonic()

    def _frame(self) -> Frame | None:
        if self.ready is not None:
            ready, self.ready = self.ready, None
            return ready
        while self.frames is not None or self.queue:
            if self.frames is None:
                message, number, offset = self.queue.popleft()
                self.frames = cut(message, self.node.job, number, offset)
            frame = next(self.frames, None)
            if frame is not None:
                return frame
            self.frames = None
        return None

    def _start_over(self) -> None:
        """The connection broke and took frames with it: what was half sent is given up."""
        self.close()
        self.frames = self.ready = None
        self._open()

    def credits(self) -> None:
        """Take the credits that have come."""
        while True:
            try:
                header = unpack_header(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError:
                self.node.counts["refused"] += 1
                continue
            if header.op == CREDIT and header.job == self.node.job:
                self.outstanding, self.heard = max(0, self.outstanding - header.frame), time.monotonic()
                if self.node.slab is not None:
                    self.node.slab.free(header.number)


class Node:
    """A state machine with sockets.

    Args:
        machine: ``Manager``, ``Server`` or ``Client``.
        job: secret number of the job, 64 bits.
        endpoint: where to listen; ``tcp://127.0.0.1:*`` takes a free port.
        book: address -> endpoint of those that are known from the start.
        most: bytes that one message may have.
        folder: of shared memory on this host; without one everything goes through sockets.
        slab_bytes: size of this process's shared memory.
        keys: needed where an endpoint is reached from other hosts.
        patience: seconds without a credit after which a connection is made anew.

    Raises:
        ValueError: the endpoint is reached from other hosts and there are no keys.
    """

    def __init__(
        self,
        machine: Machine,
        job: int,
        endpoint: str,
        book: dict[str, str],
        most: int = 1 << 32,
        folder: Path | None = None,
        slab_bytes: int = 0,
        keys: Keys | None = None,
        patience: float = 5.0,
    ) -> None:
        if not is_local(endpoint) and keys is None:
            raise ValueError(
                f"{endpoint} is reached from other hosts. Give keys=Keys.make(), the same to all processes."
            )
        self.machine, self.job, self.book, self.most, self.keys = machine, job, dict(book), most, keys
        self.patience, self.counts = patience, Counter[str]()
        self.context, self.poller = zmq.Context(), zmq.Poller()
        self.slab = Slab(folder, machine.address, slab_bytes) if folder is not None and slab_bytes else None
        self.shared = SlabReader(folder) if folder is not None else None
        self.links: dict[str, Link] = {}
        self._number = self._learnt = 0
        self._assemblies: dict[bytes, Assembly] = {}
        self._last: dict[bytes, int] = {}  # number of the last message of each peer
        self._owed: Counter[bytes] = Counter()
        self._due = 0.0
        self._listen(endpoint)

    def _listen(self, endpoint: str) -> None:
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger, self.router.rcvhwm, self.router.sndhwm = 0, 4 * WINDOW, 64
        self.router.router_handover, self.router.router_mandatory = True, True
        self.router.maxmsgsize = 2 << 20
        if self.keys is not None:
            self.keys.listen(self.router)
        self.router.bind(endpoint)
        self.endpoint = cast(bytes, self.router.last_endpoint).decode().rstrip("\0")
        self.poller.register(self.router, zmq.POLLIN)

    def next_number(self) -> int:
        """The number of the next message, higher than all before it."""
        self._number += 1
        return self._number

    def into_slab(self, message: m.Message, number: int) -> int | None:
        """Copy large tensors to shared memory, if there is room: where they are."""
        assert self.slab is not None
        _, _, tensors = wire.encode(message)
        large = sum(tensor.nbytes for tensor in tensors) >= SLAB_FROM
        return self.slab.put(number, tensors) if large else None

    def send(self, messages: list[m.Message]) -> None:
        """Put messages on their way."""
        self.learn()
        for message in messages:
            if message.target == self.machine.address:
                self.send(self.machine.handle(message, self.now()))
            elif message.target in self.book:
                if message.target not in self.links:
                    self.links[message.target] = Link(self, self.book[message.target])
                self.links[message.target].put(message)
                self.links[message.target].push()
            else:
                self.counts["unreachable"] += 1

    def learn(self) -> None:
        """Take endpoints from the machine's view, and close what leads to those that are gone."""
        view = self.machine.view
        if view.number == self._learnt:
            return
        self._learnt = view.number
        self.book |= view.endpoints
        for address in [a for a in self.links if a not in view.endpoints and a != MANAGER]:
            if self.machine.address != MANAGER:
                self.links.pop(address).close()

    @staticmethod
    def now() -> float:
        """Seconds, of a clock that never goes back."""
        return time.monotonic()

    def pump(self, timeout: float) -> None:
        """Wait at most so many seconds for something, and react to all that is there."""
        due = self.machine.wake_at
        wait = timeout if due is None else min(timeout, max(0.0, due - self.now()))
        if any(link.blocked or link.outstanding for link in self.links.values()):
            wait = min(wait, 0.005 if any(link.blocked for link in self.links.values()) else 1.0)
        for socket, _ in self.poller.poll(math.ceil(1e3 * wait)):
            if socket is self.router:
                self._receive_all()
        for link in list(self.links.values()):
            link.credits()
            link.push()
        due = self.machine.wake_at
        if due is not None and self.now() >= due:
            self.send(self.machine.handle(m.Message("", self.machine.address, 0, m.Wake()), self.now()))

    def run(self, until: Callable[[], bool]) -> None:
        """Pump until something is the case."""
        while not until():
            self.pump(0.2)

    def close(self) -> None:
        """Close everything."""
        for link in self.links.values():
            link.close()
        self.router.close(0)
        self.context.term()
        if self.slab is not None:
            self.slab.close()

    def _receive_all(self) -> None:
        for _ in range(64):
            try:
                peer = self.router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(peer)
            except WireError as error:
                self.counts["refused"] += 1
                self.counts[f"refused: {error}"[:60]] += 1
                self._assemblies.pop(peer, None)
            finally:
                while self.router.rcvmore:
                    self.router.recv()

    def _receive(self, peer: bytes) -> None:
        raw = self._part("a frame without a header")
        if len(raw) != wire.HEADER.size:
            raise WireError("not a header")
        fields = wire.HEADER.unpack(raw)
        begins, meta_bytes = fields[6] == 0, fields[8]
        content = self._part("a frame without content") if begins else b""
        if meta_bytes > wire.MOST_META:
            raise WireError("too much meta")
        header = unpack_header(raw, content)
        if header.job != self.job:
            raise WireError("of another job")
        if begins and self.router.rcvmore:
            raise WireError("more parts than a frame has")
        assembly = self._begin(peer, header, content) if begins else self._go_on(peer, header)
        self._owed[peer] += 1
        if assembly.is_whole:
            del self._assemblies[peer]
            self._finish(peer, assembly)
        elif self._owed[peer] >= FRESH_CREDIT:
            self._credit(peer, 0)

    def _part(self, otherwise: str) -> bytes:
        if not self.router.rcvmore:
            raise WireError(otherwise)
        return self.router.recv()

    def _begin(self, peer: bytes, header: Header, content: bytes) -> Assembly:
        if header.number <= self._last.get(peer, 0):
            raise WireError("a message that came before")
        if len(self._assemblies) >= PEERS:
            raise WireError("too many peers at once")
        self._last[peer] = header.number
        assembly = self._assemblies[peer] = Assembly(header, content, self.most)
        return assembly

    def _go_on(self, peer: bytes, header: Header) -> Assembly:
        assembly = self._assemblies.get(peer)
        if assembly is None or not self.router.rcvmore:
            raise WireError("a frame of no message")
        place = assembly.place(header)
        if self.router.recv_into(place) != len(place):
            raise WireError("a frame is not as long as its header says")
        return assembly

    def _finish(self, peer: bytes, assembly: Assembly) -> None:
        if assembly.header.flags & wire.SLAB:
            self._copy_from_slab(peer, assembly)
        message = assembly.message()
        if message.source.encode() != peer:
            raise WireError("a message in another's name")
        if assembly.header.flags & wire.SLAB or self._owed[peer] >= FRESH_CREDIT:
            self._credit(peer, assembly.header.number)
        if isinstance(message.body, m.Hello) and message.body.endpoint:
            self.book.setdefault(message.source, message.body.endpoint)
        self.send(self.machine.handle(message, self.now()))

    def _copy_from_slab(self, peer: bytes, assembly: Assembly) -> None:
        owner = peer.decode(errors="replace")
        if self.shared is None or not self.shared.take(owner, assembly.header.payload, assembly.tensors):
            raise WireError("no such place in shared memory")

    def _credit(self, peer: bytes, number: int) -> None:
        count = self._owed.pop(peer, 0)
        try:
            self.router.send_multipart([peer, Header(CREDIT, 0, self.job, number, count, 1, 0, 0).pack()], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["unreachable"] += 1


def endpoint_in(folder: Path, address: str) -> str:
    """An ipc endpoint in a folder of the job."""
    return f"ipc://{folder / address}"
