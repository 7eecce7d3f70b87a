"""Messages cut into frames of at most 1 MB, and put together again where they arrive.

The one idea: frame 0 says what comes (types and lengths), so the receiver allocates once and every later frame is
copied to its place, however the sender cut. Lengths are checked against a limit before anything is allocated. Left
out: sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from lightning_parallel.server import wire
from lightning_parallel.server.messages import Message
from lightning_parallel.server.wire import Header, WireError

FRAME_BYTES = 1 << 20
INLINE_BYTES = 1 << 15  # payloads up to that travel behind the meta, in frame 0

Frame = tuple[bytes, bytes | memoryview]


def view_bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory as bytes."""
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy())) if tensor.numel() else memoryview(b"")


def cut(message: Message, job: int, number: int, offset: int | None = None) -> Iterator[Frame]:
    """The frames of a message: pairs of header and content. The tensors' memory is read when a frame is taken.

    Args:
        message: what is sent.
        job: secret number of the job.
        number: of the message.
        offset: where the tensors lie in the sender's shared memory; then frame 0 says so, and is the only one.
    """
    op, meta, tensors = wire.encode(message)
    if offset is not None:
        yield Header(op, wire.SLAB, job, number, 0, 1, len(meta), offset).pack(meta), meta
        return
    pieces = [piece for tensor in tensors for piece in _pieces(view_bytes(tensor), FRAME_BYTES)]
    total = sum(len(piece) for piece in pieces)
    if total <= INLINE_BYTES:
        content = meta + b"".join(pieces)
        yield Header(op, 0, job, number, 0, 1, len(meta), total).pack(content), content
        return
    frames = 1 + len(pieces)
    yield Header(op, 0, job, number, 0, frames, len(meta), total).pack(meta), meta
    for index, piece in enumerate(pieces):
        yield Header(op, 0, job, number, index + 1, frames, 0, len(piece)).pack(), piece


def _pieces(raw: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


class Assembly:
    """One message on its way in.

    Args:
        header: of frame 0.
        content: of frame 0: the meta, and a small payload behind it.
        most: bytes that a message may have at most.

    Raises:
        WireError: frame 0 does not announce a message of at most so many bytes.
    """

    def __init__(self, header: Header, content: bytes | memoryview, most: int) -> None:
        meta, inline = content[: header.meta], content[header.meta :]
        if header.frame != 0 or header.meta != len(meta):
            raise WireError("a message begins in the middle")
        shapes = wire.describe(meta)
        sizes = [length * dtype.itemsize for dtype, length in shapes]
        if sum(sizes) > most:
            raise WireError(f"a message of {sum(sizes)} bytes; at most {most} are taken")
        if not header.flags & wire.SLAB and (sum(sizes) != header.payload or header.frames > 1 + header.payload):
            raise WireError("the tensors are not as long as the payload")
        self.header, self.meta, self.next, self.sizes = header, bytes(meta), 1, sizes
        self.tensors = [torch.empty(length, dtype=dtype) for dtype, length in shapes]
        self._places = [view_bytes(tensor) for tensor in self.tensors if tensor.numel()]
        self._offset = 0
        if inline:
            self._fill(inline)

    def _fill(self, inline: bytes | memoryview) -> None:
        if len(inline) != sum(map(len, self._places)) or self.header.frames != 1 or self.header.flags & wire.SLAB:
            raise WireError("the tensors are not as long as the payload")
        at = 0
        for place in self._places:
            place[:] = inline[at : at + len(place)]
            at += len(place)
        self._places = []

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
        return self.next == self.header.frames and (bool(self.header.flags & wire.SLAB) or not self._places)

    def message(self) -> Message:
        """The message.

        Raises:
            WireError: its values are not those of its kind.
        """
        return wire.decode(self.header.op, self.meta, self.tensors)
