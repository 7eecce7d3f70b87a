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
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

_CIPHERS = "AECDH-AES256-SHA:@SECLEVEL=0"  # OpenSSL counts what has no certificates as level 0
_PATIENCE_S = 20.0  # for a peer's hello and proof
_LENGTH = struct.Struct("!Q")
_LISTENS, _CONNECTS, _PROOF = b"listens", b"connects", 32


class SealedConnection:
    """An end, used as a ``multiprocessing.connection.Connection``.

    Args:
        stream: connected.
        secret: that the other end has to know.
        listens: whether this is the end that was connected to.

    Raises:
        AuthenticationError: the other end does not know the secret.
        OSError: it is no end of such a connection, or gone.
    """

    def __init__(self, stream: socket.socket, secret: bytes, listens: bool) -> None:
        stream.settimeout(_PATIENCE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = _context(listens).wrap_socket(stream, server_side=listens)
        self.closed = False
        try:
            self._prove(secret, listens)
        except BaseException:
            self.close()
            raise
        self._tls.settimeout(None)

    def _prove(self, secret: bytes, listens: bool) -> None:
        """The end that connected proves itself first."""
        session = self._tls.get_channel_binding("tls-unique") or b""
        if not listens:
            self._tls.sendall(_proof(secret, _CONNECTS, session))
        try:
            theirs = self._read(_PROOF)
        except EOFError as error:
            raise AuthenticationError("the other end took another secret for its own") from error
        if not session or not hmac.compare_digest(theirs, _proof(secret, _CONNECTS if listens else _LISTENS, session)):
            raise AuthenticationError("the other end does not know the secret")
        if listens:
            self._tls.sendall(_proof(secret, _LISTENS, session))

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


def _proof(secret: bytes, role: bytes, session: bytes) -> bytes:
    return hmac.digest(secret, role + session, "sha256")
