"""Connections between hosts: what passes, what is refused, what somebody in between sees and can do."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait

import pytest

from lightning_parallel.handshake import Unproven
from lightning_parallel.parameter_server.transport import sealed
from lightning_parallel.parameter_server.transport.sealed import SealedConnection, seal
from lightning_parallel.strangers import drive

SECRET = b"0123456789abcdef"
pytestmark = pytest.mark.timeout(60)


def sealed_end(stream, key, listens):
    return SealedConnection(drive(stream, seal(stream, key, listens), 20.0))


def both(near, far, secret=SECRET, other=SECRET):
    """What becomes of the end that connects, and of the one that listens."""
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(sealed_end, near, secret, False), pool.submit(sealed_end, far, other, True)]
        return [end.exception() or end.result() for end in ends]


def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_messages_pass_whole_and_a_selector_sees_each():
    near, far = both(*tcp())
    assert not far.poll()
    blobs = [b"", b"a", bytes(range(256)) * 5000, b"end"]
    sender = threading.Thread(target=lambda: [near.send_bytes(blob) for blob in blobs])
    sender.start()
    for blob in blobs:
        assert wait([far], timeout=20) == [far] and far.poll()
        assert far.recv_bytes() == blob
    sender.join()
    assert not far.poll()
    far.send_bytes(b"back")
    assert near.recv_bytes() == b"back"
    near.close()
    assert wait([far], timeout=20) == [far]
    with pytest.raises(EOFError):
        far.recv_bytes()
    with pytest.raises(OSError, match="closed"):
        near.fileno()


def test_nobody_is_taken_in_with_another_secret():
    near, far = both(*tcp(), other=SECRET[::-1])
    assert isinstance(near, OSError) and isinstance(far, Unproven)


def test_a_listener_is_no_use_to_whoever_does_not_say_what_is_expected():
    near, far = tcp()
    with near:
        near.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(OSError, match="SSL"):
            sealed_end(far, SECRET, True)


def test_who_sends_a_byte_now_and_then_is_not_waited_for_longer():
    """A hello of TLS that comes in pieces: each is in time, and all together are not."""
    near, far = tcp()
    over = threading.Event()

    def dribble():
        with near, suppress(OSError):
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(500):
                near.sendall(bytes([byte]))
                if over.wait(0.05):
                    return

    slow = threading.Thread(target=dribble)
    slow.start()
    with pytest.raises(TimeoutError, match="did not answer"):
        drive(far, seal(far, SECRET, True), 0.5)
    over.set()
    slow.join()


class Between:
    """Passes bytes on, and keeps them."""

    def __init__(self, change=lambda blob: blob):
        self.change, self.seen = change, b""
        (self.near, self._one), (self._two, self.far) = tcp(), tcp()
        ways = ((self._one, self._two), (self._two, self._one))
        self._threads = [threading.Thread(target=self._pass, args=way) for way in ways]
        for thread in self._threads:
            thread.start()

    def _pass(self, source, target):
        with suppress(OSError):
            while blob := source.recv(1 << 16):
                self.seen += blob
                target.sendall(self.change(blob))
            target.shutdown(socket.SHUT_WR)

    def end(self):
        for thread in self._threads:
            thread.join()
        self._one.close()
        self._two.close()


def test_who_is_in_between_reads_nothing():
    between = Between()
    near, far = both(between.near, between.far)
    near.send_bytes(b"the weights of the user" * 10)
    assert far.recv_bytes() == b"the weights of the user" * 10
    assert len(between.seen) > 230 and b"weights" not in between.seen and SECRET not in between.seen
    near.close()
    far.close()
    between.end()


def test_what_was_changed_on_its_way_is_not_taken():
    flip = []
    between = Between(lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]) if flip else blob)
    near, far = both(between.near, between.far)
    flip.append(True)
    near.send_bytes(b"a pickle")
    with pytest.raises(OSError, match="MAC"):
        far.recv_bytes()
    near.close()
    far.close()
    between.end()


def pass_on(source, target):
    with suppress(OSError, EOFError):
        while True:
            target._tls.sendall(source._read(1))


def test_who_ends_both_sessions_in_between_cannot_pass_the_proofs_on(monkeypatch):
    """It agrees on keys with either end, as anybody may, and passes on what they say; the sessions differ."""
    (near, one), (two, far) = tcp(), tcp()
    prove = sealed._prove

    def or_not(tls, key, listens):
        if key:
            yield from prove(tls, key, listens)

    monkeypatch.setattr(sealed, "_prove", or_not)
    with ThreadPoolExecutor(6) as pool:
        ends = [pool.submit(sealed_end, near, SECRET, False), pool.submit(sealed_end, far, SECRET, True)]
        left, right = pool.submit(sealed_end, one, b"", True), pool.submit(sealed_end, two, b"", False)
        pool.submit(pass_on, left.result(), right.result())
        pool.submit(pass_on, right.result(), left.result())
        assert "does not know the key" in str(ends[1].exception())
        left.result()._tls.shutdown(socket.SHUT_RDWR)
        assert isinstance(ends[0].exception(), OSError)
