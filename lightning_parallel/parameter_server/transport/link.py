"""What goes to one peer: messages that wait, the frames of the one that is on its way, the peer's credits.

    DEALER --frame, frame, ...--> ROUTER      at most ``WINDOW`` bytes without a credit
    DEALER <------- credit ------ ROUTER      after ``FRESH_CREDIT`` bytes, and when a place in shared memory is free

The one idea: few bytes are under way, and what waits is what the state machine has under way, once: a message that
waits already does not wait twice, and news takes the place of older news. So a large job waits for a slow peer, and
memory stays small whatever the peer does. Beyond a limit that an honest job does not reach messages are dropped, since
the state machines send again what counts. Left out: what comes in (``inbox.py``).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

from lightning_parallel.parameter_server import wire
from lightning_parallel.parameter_server.messages import Append, Copy, Message, Push, Rows
from lightning_parallel.parameter_server.transport.frames import INLINE_BYTES, Encoded, Frame, alone, frames
from lightning_parallel.parameter_server.transport.keys import CurveKeys
from lightning_parallel.parameter_server.transport.password import Password
from lightning_parallel.parameter_server.transport.pyzmq import NOBLOCK, SNDMORE, zmq
from lightning_parallel.parameter_server.transport.slab import Slab
from lightning_parallel.parameter_server.wire import Header, WireError, unpack_header

CREDIT = 255  # op of a credit: ``payload`` bytes may be sent, the place of message ``number`` is free
WINDOW, FRESH_CREDIT = 16 << 20, 4 << 20
LEAST_WEIGHT = 1 << 14  # bytes that the smallest frame counts for
FRAMES = 32  # frames that a socket keeps at most
QUEUE = 256  # messages that wait for one peer at most, where nobody says how many a job may have under way
COPY_BELOW = 1 << 16  # bytes of a frame below which handing over memory costs more than a copy
SLAB_FROM = 1 << 14  # bytes from which shared memory is used
ROWS = wire.BODIES.index(Rows)


def weight(content: bytes | memoryview) -> int:
    """What a frame counts for in the window."""
    return max(len(content), LEAST_WEIGHT)


def credit(job: int, number: int, count: int) -> bytes:
    """A credit's bytes."""
    return Header(CREDIT, 0, job, number, 0, 1, 0, count).pack()


def label(message: Message) -> Hashable:
    """Equal for messages of which one is enough.

    Example:
        >>> from lightning_parallel.parameter_server.messages import Ack, Append, Entry
        >>> label(Message("a", "b", 3, Ack(key=1, seq=5)))[1:]
        (3, (1, 5), None)
        >>> label(Message("a", "b", 3, Append(1, Entry(lsn=7)))) == label(Message("a", "b", 3, Append(1, Entry(lsn=8))))
        False
    """
    body = message.body
    if isinstance(body, Rows) and body.request == -1:
        return Rows, message.view, body.key
    kind: Any = type(body)
    return kind, message.view, _scalars(kind)(body), _inner(body)


@cache
def _scalars(kind: type) -> Callable[[Any], Hashable]:
    names = [field.name for field in fields(kind) if field.type in ("int", "str")]
    return attrgetter(*names) if names else lambda body: None


def _inner(body: Any) -> int | None:
    if isinstance(body, Push) and body.pull is not None:
        return body.pull.request
    if isinstance(body, Append):
        return body.entry.lsn
    return body.numbers.get("lsn") if isinstance(body, Copy) else None


class PeerLink:
    """The way to one peer.

    Args:
        context: of the sockets.
        me: this process's address.
        endpoint: where the peer listens.
        job: secret number of the job.
        counts: where dropped and refused messages are counted.
        poller: is told of the socket.
        slab: this process's shared memory, if the peer can see it.
        proof: that this process is of the job, where one is asked for.
        patience: seconds without a credit after which the connection is made anew.
        most: messages that wait at most.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        me: str,
        endpoint: str,
        job: int,
        counts: Counter[str],
        poller: zmq.Poller,
        slab: Slab | None = None,
        proof: CurveKeys | Password | None = None,
        patience: float = 5.0,
        most: int = QUEUE,
    ) -> None:
        self.context, self.me, self.endpoint, self.job, self.counts = context, me, endpoint, job, counts
        self.poller, self.slab, self.proof, self.patience, self.most = poller, slab, proof, patience, most
        # what waits, by its label: the message, its number, its place in the slab
        self.queue: OrderedDict[Hashable, tuple[Encoded, int, int | None]] = OrderedDict()
        self.blocked = False  # the socket takes nothing now
        self._frames: Iterator[Frame] | None = None
        self._ready: Frame | None = None
        self._placed: set[int] = set()  # numbers of messages that the slab keeps for the peer
        self._open()

    def _open(self) -> None:
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.identity = self.me.encode()
        self.socket.linger, self.socket.sndhwm, self.socket.immediate = 0, FRAMES, 1
        self.socket.maxmsgsize = 1 << 12
        if self.proof is not None:
            self.proof.connect(self.socket)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self.poller.register(self.socket, zmq.POLLIN)
        self.outstanding, self.heard = 0, time.monotonic()

    def _shut(self) -> None:
        self.poller.unregister(self.socket)
        self.socket.close(0)

    def close(self) -> None:
        """Drop the connection, what waits for it, and what the slab keeps for the peer."""
        self._shut()
        for number in self._placed:
            self._free(number)

    def _free(self, number: int) -> None:
        if self.slab is not None:
            self.slab.free(number)

    @property
    def waits(self) -> bool:
        """Whether something could be sent if the peer gave a credit or the socket had room."""
        return self.blocked or (self.outstanding >= WINDOW and self.has_more)

    @property
    def expects(self) -> bool:
        """Whether credits are worth a look."""
        return bool(self._placed) or self.outstanding >= WINDOW // 2

    @property
    def has_more(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self.queue) or self._frames is not None or self._ready is not None

    def put(self, message: Message, number: int) -> None:
        """Send a message, now or when there is room; one that waits already, or beyond the limit, is dropped."""
        name = label(message) if self.has_more else None
        if name is not None and not self._has_room(name):
            self.counts["dropped"] += 1
            return
        encoded, place = wire.encode(message), None
        total = sum([tensor.nbytes for tensor in encoded[2]])
        if self.slab is not None and total >= SLAB_FROM:
            place = self.slab.put(number, encoded[2])
        if place is not None:
            self._placed.add(number)
        if total <= INLINE_BYTES and not self.has_more and self.outstanding < WINDOW:
            self._ready = (b"", alone(encoded, self.job, number, total, place))
        else:
            self.queue[name or label(message)] = (encoded, number, place)
        self.push()

    def _has_room(self, name: Hashable) -> bool:
        """Whether a message may wait; it takes the place of older news."""
        if name not in self.queue:
            return len(self.queue) < self.most
        if self.queue[name][0][0] != ROWS:
            return False
        _, number, place = self.queue.pop(name)
        if place is not None:
            self._placed.discard(number)
            self._free(number)
        return True

    def push(self) -> None:
        """Send what credits and socket allow."""
        if self.outstanding >= WINDOW and time.monotonic() - self.heard > self.patience:
            self._start_over()
        self.blocked = False
        while self.outstanding < WINDOW and (frame := self._frame()) is not None:
            if not self._send(*frame):
                self._ready, self.blocked = frame, True
                return
            self.outstanding += weight(frame[1])
            if self.outstanding >= WINDOW:
                self.heard = time.monotonic()

    def _send(self, header: bytes, content: bytes | memoryview) -> bool:
        try:
            if not header:
                self.socket.send(content, NOBLOCK)
                return True
            self.socket.send(header, NOBLOCK | SNDMORE)
        except zmq.Again:
            return False
        self.socket.send(content, 0, copy=len(content) < COPY_BELOW)
        return True

    def _frame(self) -> Frame | None:
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        while self._frames is not None or self.queue:
            if self._frames is None:
                encoded, number, place = self.queue.popitem(last=False)[1]
                self._frames = frames(encoded, self.job, number, place)
            frame = next(self._frames, None)
            if frame is not None:
                return frame
            self._frames = None
        return None

    def _start_over(self) -> None:
        """The connection broke and took frames with it: what was half sent is given up."""
        self._shut()
        self._frames = self._ready = None
        self._open()

    def credits(self) -> None:
        """Take the credits that have come."""
        while True:
            try:
                header = unpack_header(self.socket.recv(NOBLOCK))
            except zmq.Again:
                return
            except WireError:
                self.counts["refused"] += 1
                continue
            if header.op == CREDIT and header.job == self.job:
                self.outstanding, self.heard = max(0, self.outstanding - header.payload), time.monotonic()
                if header.number in self._placed:
                    self._placed.remove(header.number)
                    self._free(header.number)
