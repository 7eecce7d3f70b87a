"""Where a hub waits for whoever comes: workers and servers of its run. Strangers are served side by side.

The one idea: an arrival is a connection on which both ends have met and the hub was told who comes. On one host the
system says whose process is at the other end, between hosts the run's secret does (``hosts.py``). Left out: what
arrivals are for.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from lightning_parallel.handshake import Unproven
from lightning_parallel.parameter_server.trainer.coordination.hello import Introduction, hear, say
from lightning_parallel.parameter_server.transport.sealed import AnyConnection
from lightning_parallel.strangers import MOST, PATIENCE_S, Strangers, Waits, drive

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BACKLOG = 1024


class Arrival(NamedTuple):
    """Who has come, and the connection to it."""

    line: AnyConnection
    hello: Introduction


Greet = Callable[[socket.socket], Waits[Arrival]]


class Reception:
    """A hub's listener.

    Args:
        server: listens.
        greet: how who connected becomes an arrival.
        expected: how many are to come; so many more are looked after at once.
        patience_s: how long each may take, in seconds.
    """

    def __init__(self, server: socket.socket, greet: Greet, expected: int, patience_s: float = PATIENCE_S) -> None:
        self._strangers = Strangers(server, greet, MOST + expected, patience_s)
        self._come: deque[Arrival] = deque()

    @property
    def dropped(self) -> int:
        """How many were turned away."""
        return self._strangers.dropped

    def next(self) -> Arrival:
        """Wait for who comes next."""
        while not self._come:
            poller, wait_s = select.poll(), self._strangers.wait_s(time.monotonic())
            self._strangers.register(poller)
            poller.poll(None if wait_s == float("inf") else 1000 * wait_s + 1)
            self._come += self._strangers.advance(time.monotonic())
        return self._come.popleft()

    def close(self) -> None:
        """Wait for nobody any more."""
        self._strangers.close()
        while self._come:
            self._come.popleft().line.close()


def listen(path: Path) -> socket.socket:
    """A listener that processes of this host find by a file."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(path))
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def greet(stream: socket.socket) -> Waits[Arrival]:
    """Take in a process of this user."""
    _, user, _ = _CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise Unproven(f"it is a process of user {user}")
    hello = yield from hear(stream)
    stream.setblocking(True)
    return Arrival(Connection(stream.detach()), hello)


def come(path: Path, hello: Introduction, seconds: float = PATIENCE_S) -> Connection:
    """Come to a hub of this host.

    Raises:
        FileNotFoundError, ConnectionRefusedError: there is none.
        ConnectionResetError: it ended, or turned this one away.
        TimeoutError: it does not answer in so many seconds.
    """
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(seconds)
        stream.connect(str(path))
        stream.setblocking(False)
        drive(stream, say(stream, hello), seconds)
        stream.setblocking(True)
        return Connection(stream.detach())
