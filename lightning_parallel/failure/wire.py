"""Framed messages over one TCP socket, for the watch: nothing here ever blocks.

The one idea: a process that dies closes its sockets, so a connection of one's own tells of its end at once, on any host
and whatever killed it. Left out: who says what to whom (``watch.py``).
"""

import pickle
import socket
import struct
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK_BYTES = 1 << 16


class Line:
    """One connection that sends and receives small picklable objects; ``closed`` once the other side is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.closed = connection, False
        self._incoming, self._outgoing = bytearray(), bytearray()

    def send(self, message: Any) -> None:
        """Queue a message and send what the socket takes now."""
        blob = pickle.dumps(message)
        self._outgoing += _LENGTH.pack(len(blob)) + blob
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; whether all has left."""
        try:
            while self._outgoing and not self.closed:
                del self._outgoing[: self.socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # receive() says `closed`, after what the other side sent last
        return not self._outgoing

    def receive(self) -> list[Any]:
        """The messages that have come in whole."""
        self._fill()
        messages = []
        while (end := self._frame_end()) is not None:
            messages.append(pickle.loads(self._incoming[_LENGTH.size : end]))
            del self._incoming[:end]
        return messages

    def receive_raw(self, size: int) -> bytes | None:
        """The next ``size`` bytes unread, or None before they are there: how a stranger is told from a rank."""
        self._fill()
        if len(self._incoming) < size:
            return None
        raw = bytes(self._incoming[:size])
        del self._incoming[:size]
        return raw

    def send_raw(self, raw: bytes) -> None:
        """Queue bytes without a frame."""
        self._outgoing += raw
        self.flush()

    def close(self) -> None:
        """Close this side."""
        self.closed = True
        self.socket.close()

    def _fill(self) -> None:
        try:
            while not self.closed:
                chunk = self.socket.recv(_CHUNK_BYTES)
                self.closed = not chunk
                self._incoming += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def _frame_end(self) -> int | None:
        if len(self._incoming) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
        return end if len(self._incoming) >= end else None


def listen(host: str) -> socket.socket:
    """A listening socket on a free port that ranks reach as ``host``: loopback stays on loopback."""
    loopback = host in ("127.0.0.1", "localhost", "::1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server(((host if loopback else ""), 0), family=family, backlog=1024)
    server.setblocking(False)
    return server
