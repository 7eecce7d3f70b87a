"""What whoever comes to a hub says first: what it is, its number, and one thing more; in JSON, and never unpickled.

The one idea: it is a part of how both ends meet, so whoever says nothing, or something else, is one of the strangers
that hold nobody up (``strangers.py``). The hub says that it has heard, so that who was turned away comes again.
Left out: who listens (``reception.py``), what becomes of it (``external_coordinator.py``, ``join_listener.py``).

    comes     length, 2 bytes | [kind, number, more] ->
              <- heard, 1 byte                          hub
"""

from __future__ import annotations

import json
import socket
import struct
from typing import NamedTuple

from lightning_parallel.strangers import Waits, read, write

WORKER, SERVER, PAST = "worker", "server", "past run"  # a worker, a server of another host, a question to the hub
_LENGTH, _HEARD = struct.Struct("!H"), b"\1"
_MOST = 1024  # bytes


class Introduction(NamedTuple):
    """Who comes.

    Args:
        kind: `WORKER`, `SERVER` or `PAST`.
        number: the rank, the server's, or that of the run which is asked about.
        more: a worker's process id, if it is on the hub's host; the name of a server's host.
    """

    kind: str
    number: int
    more: int | str | None = None


def say(stream: socket.socket, hello: Introduction) -> Waits[None]:
    """Say who comes, and wait until it was heard."""
    blob = json.dumps(hello).encode()
    yield from write(stream, _LENGTH.pack(len(blob)) + blob)
    yield from read(stream, len(_HEARD))


def hear(stream: socket.socket) -> Waits[Introduction]:
    """Who comes.

    Raises:
        ValueError: it says something else.
    """
    (length,) = _LENGTH.unpack((yield from read(stream, _LENGTH.size)))
    if length > _MOST:
        raise ValueError(f"{length} bytes to say who comes, where {_MOST} are the most")
    hello = _read((yield from read(stream, length)))
    yield from write(stream, _HEARD)
    return hello


def _read(blob: bytes) -> Introduction:
    try:
        said = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise ValueError("it does not say who it is") from error
    match said:
        case [("worker" | "server" | "past run") as kind, int(number), more] if (
            type(number) is int and number >= 0 and _suits(kind, more)
        ):
            return Introduction(kind, number, more)
    raise ValueError("it does not say who it is")


def _suits(kind: str, more: object) -> bool:
    if kind == SERVER:
        return isinstance(more, str)
    return more is None or (kind == WORKER and type(more) is int and more > 1)
