"""Messages as bytes: a fixed header, plain values with one tag each, raw buffers for tensors; nothing is unpickled.

    header   magic, version, op, flags, job, number of the message, frame, frames, bytes of meta and of payload, CRC-32
    meta     view, source, target, fields of the body: N T F i f s t m (none, booleans, integer, float, text, tuple,
    map),
             V (a tensor: type, length), C (``Coded``), E (``Entry``)
    payload  the tensors' bytes, one after the other

The one idea: what is read is checked against the annotations of the body's class before any state machine sees it; what
does not fit is a ``WireError``, whatever the bytes are. The CRC covers header and frame 0; the rest is TCP's business.
Left out: who may speak at all (``transport/zeromq.py``).
"""

from __future__ import annotations

import struct
import types
import typing
import zlib
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.server import messages as m

HEADER = struct.Struct("<4sBBHQQIIIQI")
MAGIC, VERSION = b"LPPS", 1
SLAB = 1  # flag: the payload lies in the sender's shared memory
MOST_META = 1 << 20
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float64,
)
BODIES: tuple[type, ...] = (
    m.View, m.Seed, m.Push, m.Begin, m.Hold, m.At, m.Pull, m.Rows, m.Held, m.Ack, m.Nack, m.Append, m.Committed, m.Copy,
    m.Hello, m.Lease, m.Leave, m.Refused, m.Copied, m.Want, m.Drain, m.Drained, m.Call, m.Value,
)  # fmt: skip
_OPS = {body: op for op, body in enumerate(BODIES)}


class WireError(ValueError):
    """Bytes that are not a message."""


@dataclass(frozen=True)
class Header:
    """The first bytes of every frame."""

    op: int
    flags: int
    job: int
    number: int
    frame: int
    frames: int
    meta: int
    payload: int

    def pack(self, meta: bytes = b"") -> bytes:
        """The header's bytes, with the checksum."""
        numbers = (self.op, self.flags, self.job, self.number, self.frame, self.frames, self.meta, self.payload)
        bare = HEADER.pack(MAGIC, VERSION, *numbers, 0)
        return bare[:-4] + struct.pack("<I", zlib.crc32(meta, zlib.crc32(bare[:-4])))


def unpack_header(raw: bytes | memoryview, meta: bytes | memoryview = b"") -> Header:
    """Read a header.

    Raises:
        WireError: length, magic, version or checksum are wrong.
    """
    if len(raw) != HEADER.size:
        raise WireError(f"a header has {HEADER.size} bytes, got {len(raw)}")
    magic, version, *numbers, crc = HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError("not a frame of this protocol, or of another version of it")
    if crc != zlib.crc32(meta, zlib.crc32(bytes(raw[:-4]))):
        raise WireError("the checksum is wrong")
    return Header(*numbers)


def encode(message: m.Message) -> tuple[int, bytes, list[Tensor]]:
    """Op, meta and tensors of a message.

    Example:
        >>> op, meta, tensors = encode(m.Message("a", "b", 1, m.Ack(key=0, seq=5)))
        >>> decode(op, meta, tensors).body
        Ack(key=0, seq=5)
    """
    out, tensors = bytearray(), list[Tensor]()
    body = message.body
    for value in (message.view, message.source, message.target, *(getattr(body, f.name) for f in fields(body))):
        _put(value, out, tensors)
    return _OPS[type(body)], bytes(out), tensors


def decode(op: int, meta: bytes | memoryview, tensors: list[Tensor]) -> m.Message:
    """The message, once its tensors are there.

    Raises:
        WireError: the values are not those of the body.
    """
    values = _Reader(bytes(meta), tensors).all()
    if op >= len(BODIES) or len(values) < 3:
        raise WireError("no such message")
    kind, (view, source, target, *rest) = BODIES[op], values
    hints = _hints(kind)
    if not (isinstance(view, int) and isinstance(source, str) and isinstance(target, str)) or len(rest) != len(hints):
        raise WireError(f"not the fields of {kind.__name__}")
    for value, (name, hint) in zip(rest, hints.items(), strict=True):
        if not _matches(value, hint):
            raise WireError(f"{kind.__name__}.{name} is something else")
    return m.Message(source, target, view, kind(*rest))


def describe(meta: bytes | memoryview) -> list[tuple[torch.dtype, int]]:
    """Types and lengths of the tensors that a message announces.

    Raises:
        WireError: the meta cannot be read.
    """
    reader = _Reader(bytes(meta), None)
    reader.all()
    return reader.announced


def _put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    if value is None or isinstance(value, bool):
        out += b"N" if value is None else b"T" if value else b"F"
    elif isinstance(value, int):
        out += b"i" + struct.pack("<q", value)
    elif isinstance(value, float):
        out += b"f" + struct.pack("<d", value)
    elif isinstance(value, str):
        raw = value.encode()
        out += b"s" + struct.pack("<I", len(raw)) + raw
    elif isinstance(value, Tensor):
        out += b"V" + struct.pack("<BQ", DTYPES.index(value.dtype), value.numel())
        tensors.append(value.detach().reshape(-1).contiguous())
    elif isinstance(value, (tuple, list)):
        _put_all(b"t", value, out, tensors)
    elif isinstance(value, dict):
        _put_all(b"m", [item for pair in value.items() for item in pair], out, tensors)
    elif isinstance(value, (m.Coded, m.Entry)):
        _put_all(
            b"C" if isinstance(value, m.Coded) else b"E", [getattr(value, f.name) for f in fields(value)], out, tensors
        )
    else:
        raise TypeError(f"cannot send a {type(value).__name__}")


def _put_all(tag: bytes, values: Any, out: bytearray, tensors: list[Tensor]) -> None:
    out += tag + struct.pack("<I", len(values))
    for value in values:
        _put(value, out, tensors)


class _Reader:
    """Plain values out of meta; every length is checked before it is believed."""

    def __init__(self, raw: bytes, tensors: list[Tensor] | None) -> None:
        self.raw, self.at, self.depth = raw, 0, 0
        self.tensors = None if tensors is None else list(tensors)
        self.announced: list[tuple[torch.dtype, int]] = []

    def all(self) -> list[Any]:
        values = []
        try:
            while self.at < len(self.raw):
                values.append(self._value())
        except (struct.error, UnicodeDecodeError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise WireError(f"unreadable: {error}") from error
        return values

    def _take(self, layout: str) -> Any:
        size = struct.calcsize(layout)
        values = struct.unpack_from(layout, self.raw, self.at)
        self.at += size
        return values if len(values) > 1 else values[0]

    def _value(self) -> Any:
        tag = self.raw[self.at : self.at + 1]
        self.at += 1
        if tag in b"NTF" and tag:
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag in (b"i", b"f"):
            return self._take("<q" if tag == b"i" else "<d")
        if tag == b"s":
            return self._text(self._take("<I"))
        if tag == b"V":
            return self._tensor(*self._take("<BQ"))
        return self._many(tag)

    def _text(self, size: int) -> str:
        raw = self.raw[self.at : self.at + size]
        if len(raw) != size:
            raise ValueError("text ends early")
        self.at += size
        return raw.decode()

    def _tensor(self, dtype: int, length: int) -> Tensor | None:
        self.announced.append((DTYPES[dtype], length))
        return None if self.tensors is None else self.tensors.pop(0)

    def _many(self, tag: bytes) -> Any:
        if tag not in (b"t", b"m", b"C", b"E"):
            raise ValueError(f"no such tag {tag!r}")
        count = self._take("<I")
        if count > len(self.raw) - self.at:
            raise ValueError("more values than bytes")
        self.depth += 1
        if self.depth > 8:
            raise ValueError("too deep")
        values = [self._value() for _ in range(count)]
        self.depth -= 1
        if tag == b"t":
            return tuple(values)
        if tag == b"m":
            return dict(zip(values[::2], values[1::2], strict=True))
        return self._record(m.Coded if tag == b"C" else m.Entry, values)

    def _record(self, kind: Any, values: list[Any]) -> Any:
        hints = _hints(kind)
        known = self.tensors is not None
        if len(values) != len(hints):
            raise ValueError(f"not the fields of {kind.__name__}")
        if known and not all(_matches(v, hint) for v, hint in zip(values, hints.values(), strict=True)):
            raise ValueError(f"not the types of {kind.__name__}")
        return kind(*values)


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _matches(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return isinstance(value, (str, int, float, bool, type(None)))
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return isinstance(value, tuple) and all(_matches(item, args[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_matches, value, args))
    if origin is dict:
        return isinstance(value, dict) and all(_matches(k, args[0]) and _matches(v, args[1]) for k, v in value.items())
    return isinstance(value, float if hint is float else hint) and not (hint is int and isinstance(value, bool))
