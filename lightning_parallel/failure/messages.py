"""What watches say to each other, as bytes: a letter for the kind, then JSON; nothing but an exception is ever pickled.

The one idea: whatever comes is checked, value by value, and what is no message is a `Malformed`, so that whoever sends
it moves nothing here. An exception is pickled where both ends have proven that they know the secret of the run, and is
told in words elsewhere. Left out: connections (``framed_socket.py``).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from lightning_parallel.errors import Failure, name_of

_KINDS = {"beat": b"B", "confirmed": b"C", "done": b"D", "bye": b"E", "failure": b"F"}
_NAMES = {letter: kind for kind, letter in _KINDS.items()}
_PICKLED, _PLAIN = b"P", b"J"
_LONGEST_S = 1e9
_LONGEST_WAIT = 1000  # characters of what a rank waits for
LARGEST, LARGEST_PROVEN = 1 << 20, 16 << 20  # bytes of a message, and of one between ends that know the secret


class Malformed(ValueError):
    """This is no message of a watch."""


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


Message = tuple[str, bytes | Status | None]


def encode(kind: str, body: bytes | Status | None = None) -> bytes:
    """A message as bytes.

    Example:
        >>> encode("done"), decode(b"D")
        (b'D', ('done', None))
    """
    if isinstance(body, Status):
        waiting = None if body.waiting is None else body.waiting[:_LONGEST_WAIT]
        body = json.dumps(body._replace(waiting=waiting)).encode()
    return _KINDS[kind] + (body or b"")


def decode(blob: bytes) -> Message:
    """The message that bytes are.

    Raises:
        Malformed: they are none.
    """
    kind, body = _NAMES.get(blob[:1]), blob[1:]
    if kind == "beat":
        return kind, _status(body)
    if kind == "failure" and body[:1] in (_PICKLED, _PLAIN):
        return kind, body
    if kind is None or body or kind == "failure":
        raise Malformed(f"a message of {len(blob)} bytes that is none of a watch")
    return kind, None


def packed(failure: Failure, proven: bool) -> bytes:
    """A failure, as the body of a message.

    Args:
        failure: that is told.
        proven: whether it goes to and comes from ends that know the secret of the run alone.
    """
    if proven:
        blob = _PICKLED + failure.to_bytes()
        if len(blob) < LARGEST_PROVEN:
            return blob
    return _PLAIN + failure.to_plain()


def unpacked(body: bytes, proven: bool) -> Failure:
    """The failure that the body of a message is.

    Raises:
        Malformed: it is none, or pickled by whom nobody knows.
    """
    try:
        if body[:1] == _PLAIN:
            return Failure.from_plain(body[1:])
        if proven:
            return Failure.from_bytes(body[1:])
    except Exception as error:
        raise Malformed("a failure that cannot be read") from error
    raise Malformed("a pickled exception, though nobody has proven who sends it")


def _status(body: bytes) -> Status:
    try:
        values = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed("a sign of life that is none") from error
    match values:
        case [rank, stage, [str(host), int(process)], str() | None as waiting, since, asked_by, begun, last] if (
            all(type(count) is int for count in (rank, asked_by, begun, last))
            and type(stage) in (int, type(None))
            and type(since) in (int, float)
            and rank >= 0
            and min(asked_by, begun, last) >= -1
            and 0 <= since < _LONGEST_S
        ):
            return Status(rank, stage, (host, process), waiting, float(since), asked_by, begun, last)
    raise Malformed("a sign of life that is none")


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
