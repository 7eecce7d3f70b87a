"""What somebody who reaches the store and the watch's port can do: nothing runs, and honest ranks come in."""

import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_parallel.failure.framed_socket import FramedSocket
from lightning_parallel.failure.heartbeats import HeartbeatClient, HeartbeatServer, _key
from lightning_parallel.failure.messages import Status
from lightning_parallel.failure.patience import Patience
from lightning_parallel.handshake import Unproven, connect
from lightning_parallel.secret import Secret
from lightning_parallel.strangers import drive

NOBODY = ("", 0)
SECRET = Secret.make()
pytestmark = pytest.mark.timeout(60)


class Runs:
    """A pickle that leaves a folder behind where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


class Watched:
    """Rank 0's end, looked after by a thread."""

    def __init__(self, secret: Secret | None) -> None:
        self.store = dist.HashStore()
        self.hub = HeartbeatServer(Status(0, None, NOBODY), Patience(), 3, secret).open(
            "127.0.0.1", self.store, "watch"
        )
        self.wake, self.woken = socket.socketpair()
        self.woken.setblocking(False)
        self.over, self.error = False, None
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        host, port, self.token, _ = self.store.get("watch").decode().split()
        self.address = host, int(port)

    def _look(self) -> None:
        try:
            while not self.over:
                self.hub.poll(0.02, self.woken)
        except BaseException as error:
            self.error = error

    def join(self, rank: int, secret: Secret | None) -> HeartbeatClient:
        return HeartbeatClient(Status(rank, None, NOBODY), Patience(), 3, secret).open(self.store, "watch")

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def prove(self, key: bytes, rank: int) -> FramedSocket:
        stream = self.stranger()
        stream.setblocking(False)
        try:
            return FramedSocket(stream, drive(stream, connect(stream, key, rank), 10.0))
        except Unproven:
            stream.close()
            raise

    def until_dropped(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while self.hub.dropped < count and time.monotonic() < deadline and self.error is None:
            time.sleep(0.01)
        assert (self.hub.dropped, self.error) == (count, None)

    def end(self) -> None:
        self.over = True
        self.thread.join()
        self.hub.close()
        self.wake.close()
        self.woken.close()
        assert self.error is None


@pytest.fixture(params=[None, SECRET], ids=["no secret", "secret"])
def watched(request) -> Iterator[Watched]:
    found = Watched(request.param)
    yield found
    found.end()


def test_a_pickle_behind_the_token_of_the_store_runs_nothing(watched, tmp_path):
    blob = pickle.dumps(("beat", Runs(tmp_path / "ran")))
    with watched.stranger() as stream:
        stream.sendall(watched.token.encode() + struct.pack("!I", 1) + struct.pack("!I", len(blob)) + blob)
        watched.until_dropped(1)
    key = _key(None, watched.token)  # which whoever reads the store can make
    if watched.hub.secret is not None:
        with pytest.raises(Unproven):
            watched.prove(key, 1)
    else:
        line = watched.prove(key, 1)
        line.send("failure", b"P" + blob)
        line.flush()
        watched.until_dropped(2)
        line.close()
    watched.until_dropped(2)
    assert not (tmp_path / "ran").exists() and watched.hub.failure is None
    spoke = watched.join(2, watched.hub.secret)
    spoke.close()


@pytest.mark.parametrize("frame", [b"\x80\x00\x00\x00", b"\0\0\0\1D" + bytes(32)], ids=["2^31", "forged"])
def test_a_frame_that_is_none_ends_its_connection_alone(watched, frame: bytes):
    first, second = (watched.join(rank, watched.hub.secret) for rank in (1, 2))
    first.peers[0].line.socket.sendall(frame)
    watched.until_dropped(1)
    assert watched.hub.peers[1].line.fault and watched.hub.peers[2].line.fault is None
    first.close()
    second.close()


def test_messages_out_of_their_order_are_not_taken(watched):
    spoke = watched.join(1, watched.hub.secret)
    line = spoke.peers[0].line
    line._session._said += 1  # as if one had been left out
    line.send("done")
    watched.until_dropped(1)
    assert not watched.hub.peers[1].done
    spoke.close()


def test_another_secret_another_run_and_what_was_heard_before_are_no_proof(watched):
    secret = watched.hub.secret
    for key in (_key(Secret.make(), watched.token), _key(secret, secrets.token_hex(16))):
        with pytest.raises(Unproven):
            watched.prove(key, 1)
    watched.until_dropped(2)
    said: list[bytes] = []

    class Heard(socket.socket):
        def send(self, blob: bytes, *flags: int) -> int:
            said.append(bytes(blob))
            return super().send(blob, *flags)

    with watched.stranger() as plain:
        stream = Heard(fileno=plain.detach())
    stream.setblocking(False)
    drive(stream, connect(stream, _key(secret, watched.token), 1), 10.0)
    with watched.stranger() as again:
        again.sendall(b"".join(said))  # the hello and the proof of an honest rank
        watched.until_dropped(3)
    stream.close()


def test_silent_strangers_hold_nobody_up(watched):
    silent = [watched.stranger() for _ in range(64)]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        spokes = list(pool.map(lambda rank: watched.join(rank, watched.hub.secret), (1, 2)))
    assert time.monotonic() - began < 5.0
    for end in (*silent, *spokes):
        end.close()
