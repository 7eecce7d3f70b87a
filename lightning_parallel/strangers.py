"""Connections of which nobody knows yet whose they are: all are served side by side, and none for long.

The one idea: what an end says and hears at first is a generator that stops wherever it would wait, so one thread goes
on with whichever of them can go on. Their number, seconds and bytes are bounded; where there are too many, the oldest
has to go, since one that belongs here takes milliseconds, and comes again. Left out: what is said (``handshake.py``).
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Waits: TypeAlias = Generator[int, None, T]  # yields what it waits for: select.POLLIN or select.POLLOUT
PATIENCE_S = 10.0
MOST = 128
_ACCEPTED_AT_ONCE = 64
_FULL_S = 0.1  # how long nobody is taken in where this process may open no more files


def read(stream: socket.socket, size: int) -> Waits[bytes]:
    """Exactly so many bytes, and none that come after them; also through TLS.

    Raises:
        ConnectionError: the other end has gone.
    """
    blob = b""
    while len(blob) < size:
        try:
            more = stream.recv(size - len(blob))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield select.POLLIN
            continue
        if not more:
            raise ConnectionResetError("the other end has gone")
        blob += more
    return blob


def write(stream: socket.socket, blob: bytes) -> Waits[None]:
    """Send all of it; also through TLS."""
    while blob:
        try:
            blob = blob[stream.send(blob) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            yield select.POLLOUT


def drive(stream: socket.socket, waits: Waits[T], seconds: float) -> T:
    """What becomes of it, waited for in this thread.

    Raises:
        TimeoutError: it takes longer in all.
    """
    deadline, descriptor = time.monotonic() + seconds, stream.fileno()
    try:
        event = next(waits)
        while True:
            left = deadline - time.monotonic()
            poller = select.poll()
            poller.register(descriptor, event)
            if left <= 0 or not poller.poll(1000 * left):
                waits.close()
                raise TimeoutError(f"the other end did not answer in {seconds:.0f} s")
            event = next(waits)
    except StopIteration as end:
        result: T = end.value
        return result


@dataclass
class _Stranger(Generic[T]):
    stream: socket.socket
    descriptor: int  # of `stream`, also where something else has taken it over
    waits: Waits[T]
    event: int
    since: float


class Strangers(Generic[T]):
    """Who has connected to a listener and not proven itself.

    Args:
        server: the listener; it will not block.
        greet: what is said to a connection; a generator that ends with what it has become. Anything that it raises ends
            the connection.
        most: how many are kept; the oldest has to go where more come.
        patience_s: how long each may take, in seconds.

    Attributes:
        dropped: how many were turned away.
        last: why the last of them was, in words.
    """

    def __init__(
        self,
        server: socket.socket,
        greet: Callable[[socket.socket], Waits[T]],
        most: int = MOST,
        patience_s: float = PATIENCE_S,
    ) -> None:
        server.setblocking(False)
        self.server, self._greet, self._most, self._patience_s = server, greet, most, patience_s
        self._strangers: list[_Stranger[T]] = []
        self._full_until = 0.0  # until then there are too many open files
        self.dropped, self.last = 0, ""

    def __len__(self) -> int:
        return len(self._strangers)

    def register(self, poller: select.poll) -> None:
        """Have a poller wait for whatever lets one of them go on."""
        if time.monotonic() >= self._full_until:
            poller.register(self.server.fileno(), select.POLLIN)
        for stranger in self._strangers:
            poller.register(stranger.descriptor, stranger.event)

    def wait_s(self, now: float) -> float:
        """Seconds until one of them has taken too long, or more can be taken in again."""
        ends = [one.since + self._patience_s for one in self._strangers]
        return max(0.0, min([*ends, self._full_until if self._full_until > now else float("inf")]) - now)

    def advance(self, now: float) -> list[T]:
        """Go on with all of them; those that have come to the end."""
        self._accept(now)
        come: list[T] = []
        for stranger in list(self._strangers):
            try:
                stranger.event = next(stranger.waits)
            except StopIteration as end:
                self._strangers.remove(stranger)
                come.append(end.value)
            except Exception as error:
                self._drop(stranger, str(error) or type(error).__name__)
            else:
                if now - stranger.since > self._patience_s:
                    self._drop(stranger, f"it has not said who it is in {self._patience_s:.0f} s")
        while len(self._strangers) > self._most:
            self._drop(self._strangers[0], f"more than {self._most} have not said who they are")
        return come

    def close(self) -> None:
        """Close the listener and all of them."""
        self.server.close()
        while self._strangers:
            self._drop(self._strangers[0], "nobody is waited for any more")

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                stream, _ = self.server.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it has gone again
            except OSError:  # this process may open no more files
                self._full_until = now + _FULL_S
                self._make_room()
                return
            stream.setblocking(False)
            self._strangers.append(_Stranger(stream, stream.fileno(), self._greet(stream), select.POLLIN, now))

    def _make_room(self) -> None:
        if self._strangers:
            self._drop(self._strangers[0], "there are too many open files")

    def _drop(self, stranger: _Stranger[T], why: str) -> None:
        self.dropped, self.last = self.dropped + 1, why
        self._strangers.remove(stranger)
        with suppress(Exception):
            stranger.waits.close()
        stranger.stream.close()
