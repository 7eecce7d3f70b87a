"""Framed messages over one TCP socket, for the watch: nothing here ever blocks, and no message of a stranger is read.

The one idea: a process that dies closes its sockets, so a connection of one's own tells of its end at once, on any host
and whatever killed it. Both ends have proven themselves (``handshake.py``); every message has a MAC and a number in its
row, and the first one that is not as it must be ends the connection. Left out: who says what to whom
(``failure/watch.py``).

    frame = length of the message, 4 bytes | message | HMAC-SHA256 of (number, length, message), 32 bytes
"""

import socket
import struct
from contextlib import suppress

from lightning_parallel.failure.messages import LARGEST, LARGEST_PROVEN, Malformed, Message, Status, decode, encode
from lightning_parallel.handshake import MAC, SessionKeys

_LENGTH = struct.Struct("!I")
_CHUNK_BYTES = 1 << 16
_CHUNKS_AT_ONCE = 64  # so that nobody keeps the thread by sending on and on


class FramedSocket:
    """One connection that sends and receives small messages; ``closed`` once the other side is gone.

    Args:
        connection: on which both ends have proven themselves.
        session: what came of that.
        proven: whether the key was made of the run's secret, and so whether exceptions may be pickled.

    Attributes:
        fault: what the other end sent that is no message, in words; None while all were.
    """

    def __init__(self, connection: socket.socket, session: SessionKeys, proven: bool = False) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.closed = connection, False
        self.proven = proven
        self.fault: str | None = None
        self._session, self._largest = session, LARGEST_PROVEN if proven else LARGEST
        self._incoming, self._outgoing = bytearray(), bytearray()

    def send(self, kind: str, body: bytes | Status | None = None) -> None:
        """Queue a message and send what the socket takes now."""
        blob = encode(kind, body)
        frame = _LENGTH.pack(len(blob)) + blob
        self._outgoing += frame + self._session.sign(frame)
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

    def receive(self) -> list[Message]:
        """The messages that have come in whole."""
        messages: list[Message] = []
        try:
            for _ in range(_CHUNKS_AT_ONCE):
                if not self._fill():
                    break
                while (blob := self._next()) is not None:
                    messages.append(decode(blob))
        except Malformed as error:
            self.break_off(str(error))
        return messages

    def break_off(self, why: str) -> None:
        """End the connection, since the other end does not say what it must."""
        self.fault = self.fault or why
        self._incoming.clear()
        self.close()

    def close(self) -> None:
        """Close this side."""
        self.closed = True
        self.socket.close()

    def _fill(self) -> bool:
        """Take what has come; whether it was anything."""
        try:
            chunk = self.socket.recv(_CHUNK_BYTES) if not self.closed else b""
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        self.closed = self.closed or not chunk
        self._incoming += chunk
        return bool(chunk)

    def _next(self) -> bytes | None:
        """The next message, once it is here whole."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > self._largest:
            raise Malformed(f"a message of {length} bytes, where {self._largest} are the most")
        end = _LENGTH.size + length
        if len(self._incoming) < end + MAC:
            return None
        frame, mac = bytes(self._incoming[:end]), bytes(self._incoming[end : end + MAC])
        if not self._session.check(frame, mac):
            raise Malformed("a message that was changed, left out, repeated, or is another's")
        del self._incoming[: end + MAC]
        return frame[_LENGTH.size :]


def listen(host: str) -> socket.socket:
    """A listening socket on a free port that ranks reach as ``host``: loopback stays on loopback."""
    loopback = host in ("127.0.0.1", "localhost", "::1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server(((host if loopback else ""), 0), family=family, backlog=1024)
    server.setblocking(False)
    return server
