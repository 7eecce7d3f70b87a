"""Connections between hosts that nobody else reads, changes or takes part in, for whoever knows one secret.

The one idea: there is a secret and there are no certificates. TLS agrees on keys without any (anonymous Diffie-Hellman
on elliptic curves), and then each end proves that it knows the secret, and that it is in this very session: somebody in
between would have two, whose numbers differ. Nothing is taken from a peer before its proof. Left out: who listens.

Source:
    RFC 5246 and 8422 (TLS 1.2, ECDH_anon); RFC 5929 section 3 (the channel binding `tls-unique`).
"""

from __future__ import annotations

import hmac
import select
import socket
import ssl
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from lightning_parallel.handshake import Unproven
from lightning_parallel.strangers import Waits, read, write

T = TypeVar("T")
_CIPHERS = "AECDH-AES256-SHA:@SECLEVEL=0"  # OpenSSL counts what has no certificates as level 0
_LENGTH = struct.Struct("!Q")
_LISTENS, _CONNECTS, _PROOF = b"listens", b"connects", 32


def seal(stream: socket.socket, key: bytes, listens: bool) -> Waits[ssl.SSLSocket]:
    """Agree on keys with the other end, and prove to each other that both know the run's.

    Args:
        stream: connected; the result takes it over, and does not block either.
        key: see `Secret.key`.
        listens: whether this is the end that was connected to.

    Raises:
        Unproven: the other end does not know the key.
        OSError: it is no end of such a connection, or gone.
    """
    stream.setblocking(False)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tls = _context(listens).wrap_socket(stream, server_side=listens, do_handshake_on_connect=False)
    try:
        yield from _when_ready(tls.do_handshake)
        yield from _prove(tls, key, listens)
    except BaseException:
        tls.close()
        raise
    return tls


def _when_ready(step: Callable[[], T]) -> Waits[T]:
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT


def _prove(tls: ssl.SSLSocket, key: bytes, listens: bool) -> Waits[None]:
    """The end that connected proves itself first."""
    session = tls.get_channel_binding("tls-unique") or b""
    if not listens:
        yield from write(tls, _proof(key, _CONNECTS, session))
    try:
        theirs = yield from read(tls, _PROOF)
    except ConnectionError as error:
        raise Unproven("the other end took this one's key for another") from error
    if not session or not hmac.compare_digest(theirs, _proof(key, _CONNECTS if listens else _LISTENS, session)):
        raise Unproven("the other end does not know the key")
    if listens:
        yield from write(tls, _proof(key, _LISTENS, session))


class SealedConnection:
    """An end, used as a ``multiprocessing.connection.Connection``.

    Args:
        tls: of both ends that have proven themselves (`seal`); from here on it blocks.
    """

    def __init__(self, tls: ssl.SSLSocket) -> None:
        tls.setblocking(True)
        self._tls, self.closed = tls, False

    def send_bytes(self, blob: bytes) -> None:
        """Send a message."""
        self._tls.sendall(_LENGTH.pack(len(blob)) + blob)

    def recv_bytes(self) -> bytes:
        """Wait for a message.

        Raises:
            EOFError: the other end is gone.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        blob = bytearray(length)
        view, got = memoryview(blob), 0
        while got < length:
            count = self._tls.recv_into(view[got:])
            if not count:
                raise EOFError("the other end is gone")
            got += count
        return bytes(blob)

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether there is a message, or the other end is gone."""
        if self._tls.pending():
            return True
        ends = select.poll()
        ends.register(self.fileno(), select.POLLIN)
        return bool(ends.poll(1000 * timeout))

    def fileno(self) -> int:
        """What a selector waits for: messages begin at records, so that none is left behind in this process.

        Raises:
            OSError: this end is closed.
        """
        if self.closed:
            raise OSError("the connection is closed")
        return self._tls.fileno()

    def close(self) -> None:
        """End it; the other end sees that."""
        self.closed = True
        self._tls.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close()


AnyConnection = Connection | SealedConnection


def _context(listens: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    try:
        context.set_ciphers(_CIPHERS)
    except ssl.SSLError as error:
        raise RuntimeError(
            f"{ssl.OPENSSL_VERSION} has no {_CIPHERS.partition(':')[0]}, by which workers of several hosts talk to the"
            " first one. Use a Python whose OpenSSL was built with it."
        ) from error
    return context


def _proof(key: bytes, role: bytes, session: bytes) -> bytes:
    return hmac.digest(key, role + session, "sha256")
