"""Messages as meta and tensors: from, to, the view, then the body's fields as their annotations say."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.wire.fields import record
from lightning_parallel.parameter_server.wire.header import WireError
from lightning_parallel.parameter_server.wire.plain import Source

BODIES: tuple[type, ...] = (
    m.View, m.Seed, m.Push, m.Begin, m.Hold, m.At, m.Pull, m.Rows, m.Held, m.Ack, m.Nack, m.Append, m.Committed, m.Copy,
    m.Hello, m.Lease, m.Leave, m.Refused, m.Copied, m.Want, m.Drain, m.Drained, m.Call, m.Value, m.Batch,
    m.Idle, m.Portion, m.Finished, m.Counted, m.Done, m.Read,
)  # fmt: skip
_OPS = {body: op for op, body in enumerate(BODIES)}
_CODECS = [record(body) for body in BODIES]
_ENVELOPE = struct.Struct("<HHq")  # bytes of source and target, view
_BAD = (struct.error, UnicodeDecodeError, IndexError, KeyError, TypeError, ValueError)


def encode(message: m.Message) -> tuple[int, bytes, list[Tensor]]:
    """Op, meta and tensors of a message.

    Example:
        >>> op, meta, tensors = encode(m.Message("a", "b", 1, m.Ack(key=0, seq=5)))
        >>> decode(op, meta, tensors).body
        Ack(key=0, seq=5)
    """
    op, tensors = _OPS[type(message.body)], list[Tensor]()
    out = bytearray(_envelope(message.source, message.target, message.view))
    _CODECS[op][0](message.body, out, tensors)
    return op, bytes(out), tensors


def decode(op: int, meta: bytes, tensors: list[Tensor]) -> m.Message:
    """The message, once its tensors are there.

    Raises:
        WireError: the meta cannot be read, or announces other tensors.
    """
    given = iter(tensors)

    def next_one(dtype: torch.dtype, length: int) -> Tensor:
        tensor = next(given, None)
        if tensor is None or tensor.dtype != dtype or tensor.numel() != length:
            raise ValueError("other tensors than announced")
        return tensor

    return read(op, meta, next_one)


def read(op: int, meta: bytes, source: Source) -> m.Message:
    """The message, its tensors from a source that is asked for one after the other.

    Raises:
        WireError: the meta cannot be read, or the source refuses.
    """
    try:
        sender, target, view, at = _read_envelope(meta[: _ENVELOPE.size + sum(_ENVELOPE.unpack_from(meta)[:2])])
        body, at = _CODECS[op][1](meta, at, source)
    except _BAD as error:
        raise WireError(f"unreadable: {error}") from error
    if at != len(meta):
        raise WireError(f"{len(meta) - at} bytes more than {type(body).__name__} has")
    return m.Message(sender, target, view, body)


def describe(op: int, meta: bytes) -> tuple[m.Message, list[tuple[torch.dtype, int]]]:
    """A message with None for its tensors, and the types and lengths of those.

    Raises:
        WireError: the meta cannot be read.
    """
    announced = list[tuple[torch.dtype, int]]()
    outline = read(op, meta, lambda dtype, length: announced.append((dtype, length)))
    return outline, announced


@lru_cache(maxsize=4096)
def _envelope(source: str, target: str, view: int) -> bytes:
    names = source.encode(), target.encode()
    return _ENVELOPE.pack(len(names[0]), len(names[1]), view) + names[0] + names[1]


@lru_cache(maxsize=4096)
def _read_envelope(raw: bytes) -> tuple[Any, ...]:
    first, second, view = _ENVELOPE.unpack_from(raw)
    names = raw[_ENVELOPE.size :]
    if len(names) != first + second:
        raise ValueError("names end early")
    return names[:first].decode(), names[first:].decode(), view, len(raw)
