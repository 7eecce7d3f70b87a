"""How both ends of a connection prove that they know one key, before either reads a message of the other.

The one idea: each end sends fresh random bytes, and proves that it can make a MAC of both ends' with the key. So what
was heard of another connection is no proof on this one, and what an end said is none of the other end's. The same bytes
make the keys of the messages that follow: one that was changed, repeated, left out or sent back is seen.

    connects   magic, number, nonce_c ------------------>
               <---------------------------------- nonce_l   listens
               HMAC(key, "connects", ...) -------------->
               <------------------ HMAC(key, "listens", ...)

The key is made for one purpose of one run (`Secret.key`), so that proofs of others are none. Left out: encryption
(``parameter_server/transport/sealed.py`` has it); who listens (``strangers.py``).

Source:
    ISO/IEC 9798-4 (mutual authentication by a MAC, three passes); RFC 2104 (HMAC).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

from lightning_parallel.strangers import Waits, read, write

_HELLO = struct.Struct("!4sI32s")
_MAGIC, _NONCE, MAC = b"LPH1", 32, 32  # MAC: bytes of one
_CONNECTS, _LISTENS = b"connects", b"listens"
_SEQUENCE = struct.Struct("!Q")


class Unproven(ConnectionError):
    """The other end does not know the key, or is none of such a connection."""


class SessionKeys:
    """What both ends know once they have proven themselves: a key for each direction.

    Args:
        says: makes the MACs of what this end says.
        hears: of what it hears.
        number: what the end that connected says it is.
    """

    def __init__(self, says: bytes, hears: bytes, number: int = 0) -> None:
        self._says, self._hears, self.number = says, hears, number
        self._said = self._heard = 0

    def sign(self, message: bytes) -> bytes:
        """The MAC of the next message that this end says."""
        self._said += 1
        return hmac.digest(self._says, _SEQUENCE.pack(self._said) + message, "sha256")

    def check(self, message: bytes, mac: bytes) -> bool:
        """Whether this is the next message of the other end."""
        self._heard += 1
        return hmac.compare_digest(mac, hmac.digest(self._hears, _SEQUENCE.pack(self._heard) + message, "sha256"))


def connect(stream: socket.socket, key: bytes, number: int = 0) -> Waits[SessionKeys]:
    """Prove oneself to a listener.

    Args:
        stream: connected; does not block.
        key: see `Secret.key`.
        number: that the other end is told, a rank as a rule.

    Raises:
        Unproven: the other end does not know the key.
        ConnectionError: it has gone, or turned this one away.
    """
    hello = _HELLO.pack(_MAGIC, number, secrets.token_bytes(_NONCE))
    yield from write(stream, hello)
    about = hello + (yield from read(stream, _NONCE))
    yield from write(stream, _mac(key, _CONNECTS, about))
    try:
        theirs = yield from read(stream, MAC)
    except ConnectionError as error:
        raise Unproven("the other end took this one's key for another") from error
    if not hmac.compare_digest(theirs, _mac(key, _LISTENS, about)):
        raise Unproven("the other end does not know the key")
    return SessionKeys(_mac(key, b"says " + _CONNECTS, about), _mac(key, b"says " + _LISTENS, about), number)


def listen(stream: socket.socket, key: bytes) -> Waits[SessionKeys]:
    """Have whoever connected prove itself, and then oneself; see `connect`."""
    hello = yield from read(stream, _HELLO.size)
    magic, number, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise Unproven("the other end says something else")
    nonce = secrets.token_bytes(_NONCE)
    yield from write(stream, nonce)
    about = hello + nonce
    if not hmac.compare_digest((yield from read(stream, MAC)), _mac(key, _CONNECTS, about)):
        raise Unproven("the other end does not know the key")
    yield from write(stream, _mac(key, _LISTENS, about))
    return SessionKeys(_mac(key, b"says " + _LISTENS, about), _mac(key, b"says " + _CONNECTS, about), number)


def _mac(key: bytes, role: bytes, about: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + about, "sha256")
