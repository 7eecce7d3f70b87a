"""What strangers can do at the hub of a parameter server: honest ones come in meanwhile, and nothing is unpickled."""

import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_parallel.parameter_server.trainer.coordination.hello import SERVER, WORKER, Introduction
from lightning_parallel.parameter_server.trainer.coordination.hosts import Hosts
from lightning_parallel.parameter_server.trainer.coordination.reception import Arrival, Reception, come, greet, listen
from lightning_parallel.secret import SECRET, SECRET_FILE, Secret
from tests.security.forged import Charge

LAST = 99  # the number of whoever comes last
pytestmark = pytest.mark.timeout(60)


class Desk:
    """A hub's listener and the thread that waits there."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.hosts = Hosts("127.0.0.1", Secret.make(), dist.HashStore()) if kind == "hosts" else None
        self.path = folder / "hub"
        server = listen(self.path) if self.hosts is None else self.hosts.listen(4, 1)
        self.address = server.getsockname()
        self.reception = Reception(server, greet if self.hosts is None else self.hosts.greet, 4)
        self.arrivals: list[Arrival] = []
        self.more = threading.Condition()
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        while True:
            arrival = self.reception.next()
            with self.more:
                self.arrivals.append(arrival)
                self.more.notify()
            if arrival.hello.number == LAST:
                return

    def stranger(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX if self.hosts is None else socket.AF_INET)
        found.settimeout(20)
        found.connect(self.address)
        return found

    def come_so_far(self, count: int) -> list[Introduction]:
        """Who has come, once there are so many."""
        with self.more:
            assert self.more.wait_for(lambda: len(self.arrivals) >= count, 20)
            return sorted(arrival.hello for arrival in self.arrivals)

    def come(self, number: int):
        hello = Introduction(WORKER, number, 4711)
        return come(self.path, hello) if self.hosts is None else self.hosts.connect(self.hosts.port, hello)

    def end(self) -> None:
        last = self.come(LAST)
        self.thread.join()
        last.close()
        for arrival in self.arrivals:
            arrival.line.close()
        self.reception.close()


@pytest.fixture(params=["one host", "hosts"])
def desk(request, tmp_path) -> Iterator[Desk]:
    found = Desk(request.param, tmp_path)
    yield found
    found.end()


def test_silent_strangers_hold_nobody_up(desk):
    silent = [desk.stranger() for _ in range(100)]
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(desk.come, range(4)))
    assert time.monotonic() - began < 5.0
    for end in (*silent, *lines):
        end.close()
    assert [hello.number for hello in desk.come_so_far(4)] == [0, 1, 2, 3]


def test_of_too_many_strangers_the_oldest_have_to_go(desk):
    silent = [desk.stranger() for _ in range(200)]
    desk.come(1).close()
    desk.come(2).close()  # those who were one too many when the first came have gone
    assert desk.reception.dropped >= 60
    for end in silent:
        end.close()


def test_what_is_no_hello_ends_its_connection_alone(desk, tmp_path):
    charge = Charge(tmp_path / "ran")
    blobs = [
        pickle.dumps((WORKER, 0, charge)), struct.pack("!i", 1 << 30), b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!H", 2) + b"[]", struct.pack("!H", 600) + b"[" * 600,
    ]  # fmt: skip
    hellos = [[WORKER, 0, -1], [WORKER, True, 7], [WORKER, -1, 7], [SERVER, 0, 3], ["else", 0, None], {"a": 1}]
    for said in map(json.dumps, hellos):
        blobs.append(struct.pack("!H", len(said)) + said.encode())
    for blob in blobs:
        with desk.stranger() as stream:
            stream.sendall(blob)
            stream.shutdown(socket.SHUT_WR)
            assert b"\1" not in said_by(stream)
    assert not charge.went_off
    desk.come(1).close()
    assert desk.come_so_far(1) == [Introduction(WORKER, 1, 4711)]


def said_by(stream: socket.socket) -> bytes:
    """What comes until the end; of TLS an alert alone."""
    said = b""
    try:
        while more := stream.recv(1 << 16):
            said += more
    except ConnectionResetError:
        pass
    return said if not said.startswith(b"\x15\x03") else b""


def test_a_host_with_another_secret_is_told_so(tmp_path):
    desk = Desk("hosts", tmp_path)
    other = Hosts("127.0.0.1", Secret.make(), desk.hosts.store)
    with pytest.raises(ValueError, match=r"LIGHTNING_PARALLEL_SECRET is another one on 127\.0\.0\.1"):
        other.connect(desk.hosts.port, Introduction(WORKER, 1))
    assert desk.arrivals == []
    desk.end()


def test_hosts_read_the_secret_as_all_else_does(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv(SECRET_FILE, str(file))
    monkeypatch.setattr(
        "lightning_parallel.parameter_server.trainer.coordination.hosts.open_store", lambda *arguments: dist.HashStore()
    )
    assert Hosts.meet("127.0.0.1", 1, 0, 2, None).secret == Secret("0123456789abcdef")
    monkeypatch.delenv(SECRET_FILE)
    with pytest.raises(ValueError, match=r"LIGHTNING_PARALLEL_SECRET is not set\. Set it to the same 16"):
        Hosts.meet("127.0.0.1", 1, 0, 2, None)


def test_a_process_of_another_user_is_turned_away(monkeypatch, tmp_path):
    desk = Desk("one host", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConnectionResetError, match=r"has gone|reset"):
        come(desk.path, Introduction(WORKER, 1))
    monkeypatch.undo()
    assert desk.arrivals == []
    desk.end()
