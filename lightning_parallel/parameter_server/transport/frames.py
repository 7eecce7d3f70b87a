"""Messages cut into frames of at most 1 MB, and put together again where they arrive.

The one idea: frame 0 says what comes (types and lengths), so the receiver allocates once and every later frame is
copied to its place, however the sender cut. Lengths are checked against a limit before anything is allocated. Left
out: sockets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_parallel.parameter_server import wire
from lightning_parallel.parameter_server.messages import Message
from lightning_parallel.parameter_server.wire import Header, WireError

FRAME_BYTES = 1 << 20
INLINE_BYTES = 1 << 15  # payloads up to that travel behind the meta, in frame 0

Frame = tuple[bytes, bytes | memoryview]  # the header, empty where it begins the content; the content
Destination = Callable[[Message], Tensor | None]  # where the tensor of a message, given without it, is wanted
Encoded = tuple[int, bytes, list[Tensor]]  # op, meta, tensors


def view_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory as bytes; the tensor object lives as long as any piece of the view."""
    if not tensor.numel():
        return memoryview(b"")
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    raw.owner = tensor  # type: ignore[attr-defined]
    return memoryview(raw).cast("B")


def cut(message: Message, job: int, number: int) -> Iterator[Frame]:
    """The frames of a message, each of one part or two; tensors' memory is read when a frame is taken."""
    return frames(wire.encode(message), job, number)


def frames(encoded: Encoded, job: int, number: int, place: int | None = None) -> Iterator[Frame]:
    """The frames of what ``wire.encode`` gave.

    Frame 0 is one part, header and meta and a small payload; those after it are two, header and content.

    Args:
        encoded: op, meta, tensors.
        job: secret number of the job.
        number: of the message.
        place: where the tensors lie in the sender's shared memory; then frame 0 says so, and is the only one.
    """
    op, meta, tensors = encoded
    total = sum(tensor.nbytes for tensor in tensors)
    if place is not None or total <= INLINE_BYTES:
        yield b"", alone(encoded, job, number, total, place)
        return
    pieces = [piece for tensor in tensors for piece in _pieces(view_bytes(tensor), FRAME_BYTES)]
    count = 1 + len(pieces)
    yield b"", Header(op, 0, job, number, 0, count, len(meta), total).pack(meta) + meta
    for index, piece in enumerate(pieces):
        yield Header(op, 0, job, number, index + 1, count, 0, len(piece)).pack(), piece


def alone(encoded: Encoded, job: int, number: int, total: int, place: int | None = None) -> bytes:
    """The only frame of a message whose tensors, of so many bytes, are small or lie elsewhere."""
    op, meta, tensors = encoded
    if place is not None:
        return Header(op, wire.SLAB, job, number, 0, 1, len(meta), place).pack(meta) + meta
    header = Header(op, 0, job, number, 0, 1, len(meta), total).pack(meta)
    return b"".join((header, meta, *map(view_bytes, tensors)))


def _pieces(raw: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def whole(header: Header, content: bytes, most: int) -> Message:
    """The message of a frame that is all of it.

    Raises:
        WireError: the frame is not a message of at most ``most`` bytes.
    """
    _limit(header.payload, most)
    at, end = header.meta, header.meta + header.payload
    if end != len(content) or header.frame != 0:
        raise WireError("the tensors are not as long as the payload")

    def next_one(dtype: torch.dtype, length: int) -> Tensor:
        nonlocal at
        size, start = length * dtype.itemsize, at
        at += size
        if at > end:
            raise ValueError("the tensors are not as long as the payload")
        return torch.frombuffer(bytearray(content[start:at]), dtype=dtype) if size else torch.empty(0, dtype=dtype)

    message = wire.read(header.op, content[: header.meta], next_one)
    if at != end:
        raise WireError("the tensors are not as long as the payload")
    return message


def _limit(size: int, most: int) -> None:
    if size > most:
        raise WireError(f"a message of {size} bytes; at most {most} are taken")


class Assembly:
    """One message of several frames, or of one whose tensors lie elsewhere, on its way in.

    Args:
        header: of frame 0.
        meta: content of frame 0.
        most: bytes that a message may have at most.
        place: may have memory for a message that has one tensor.

    Raises:
        WireError: frame 0 does not announce a message of at most so many bytes.
    """

    def __init__(self, header: Header, meta: bytes, most: int, place: Destination = lambda outline: None) -> None:
        if header.frame != 0 or header.meta != len(meta):
            raise WireError("a message begins in the middle")
        self.outline, self.shapes = wire.describe(header.op, meta)
        size = sum(length * dtype.itemsize for dtype, length in self.shapes)
        _limit(size, most)
        self.is_elsewhere = bool(header.flags & wire.SLAB)
        if not self.is_elsewhere and (size != header.payload or header.frames > 1 + header.payload):
            raise WireError("the tensors are not as long as the payload")
        self.header, self.meta, self.next, self._place = header, meta, 1, place
        self.tensors = [] if self.is_elsewhere else self.allocate()
        self._places = [view_bytes(tensor) for tensor in self.tensors if tensor.numel()]
        self._offset = 0

    def allocate(self) -> list[Tensor]:
        """Memory for the tensors."""
        if len(self.shapes) == 1:
            there = self._place(self.outline)
            if there is not None and (there.dtype, there.numel()) == self.shapes[0]:
                return [there]
        return [torch.empty(length, dtype=dtype) for dtype, length in self.shapes]

    def place(self, header: Header) -> memoryview:
        """Where the content of the next frame belongs.

        Raises:
            WireError: it is not the next frame of this message, or does not fit.
        """
        same = (header.op, header.job, header.number, header.frames)
        if same != (self.header.op, self.header.job, self.header.number, self.header.frames):
            raise WireError("a frame of another message")
        if header.frame != self.next or header.meta or not self._places or header.payload > self._room:
            raise WireError("a frame out of order or too long")
        place = self._places[0][self._offset : self._offset + header.payload]
        self.next, self._offset = self.next + 1, self._offset + header.payload
        if self._offset == len(self._places[0]):
            self._places.pop(0)
            self._offset = 0
        return place

    @property
    def _room(self) -> int:
        return len(self._places[0]) - self._offset

    @property
    def is_whole(self) -> bool:
        """Whether every frame has come."""
        return self.next == self.header.frames and not self._places

    def message(self) -> Message:
        """The message.

        Raises:
            WireError: its values are not those of its kind.
        """
        return wire.decode(self.header.op, self.meta, self.tensors)
