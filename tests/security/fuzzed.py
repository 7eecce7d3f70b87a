"""A stranger who sends what nobody should read to every port and socket on which a run listens, while it trains.

``Stranger`` is a process of its own. It is started before the run, knows the run's processes by a pipe that they
inherit, and looks up in /proc what they listen on. A run's `UnderFire` tells it of every step: the step ends when its
volley has been sent, so that every step is trained under fire, and neither waits for a clock. Seeds are fixed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import re
import select
import signal
import socket
import ssl
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lightning_parallel.handshake import connect
from lightning_parallel.secret import Secret
from lightning_parallel.strangers import drive
from tests.security.forged import Charge
from tests.security.test_servers import HELLO, READY, greeting

ANSWER_S, VOLLEY_S = 0.5, 300.0
LEFT_OPEN = 16
GLOO = "gloo"
MOST_AT_GLOO = (
    30  # in a volley: it keeps all connections open to the end, and ends its process when it may open no more
)
DAMAGES = ("forged", "cut off", "oversized", "replayed", "out of order", "of another run", "noise")
Pieces = list[bytes]
_fork = multiprocessing.get_context("fork")


class Port(NamedTuple):
    """What somebody can connect to: a TCP port of loopback, or the path of a socket's file."""

    family: int
    address: Any


class UnderFire(Callback):
    """Rank 0 begins every step with a volley of the stranger, and ends it when all of it was sent."""

    def __init__(self, line: Connection) -> None:
        self.line = line

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            self.line.send("fire")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            assert self.line.poll(VOLLEY_S)
            self.line.recv()


@dataclass
class Sent:
    """What the stranger has sent, by what listened: frames, and those that were not taken whole."""

    frames: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    error: str = ""


@contextmanager
def stranger(charge: Charge, store: int, volley: int, seed: int = 0, last: str = GLOO) -> Iterator:
    """A stranger beside the run that the body makes; gives what the run's `UnderFire` needs, and what was sent.

    Args:
        charge: in all that it forges.
        store: the port of torch's store.
        volley: frames a port and step.
        seed: of what it sends.
        last: what listens at a TCP port and is none of the others.
    """
    ours, theirs = _fork.Pipe()
    mark_read, mark = os.pipe()
    sent = Sent()
    arguments = (Stranger(charge, store, volley, random.Random(seed), last), os.getpid(), theirs, _inode(mark))
    process = _fork.Process(target=_main, args=arguments)
    process.start()
    try:
        yield ours, sent
        ours.send("over")
        assert ours.poll(VOLLEY_S)
        sent.__dict__.update(ours.recv().__dict__)
    finally:
        process.kill()
        process.join()
        for end in (ours, theirs):
            end.close()
        os.close(mark_read)
        os.close(mark)
    assert sent.error == ""


def _main(who: Stranger, parent: int, line: Connection, mark: str) -> None:
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    own = {os.getpid(), parent}
    try:
        while line.recv() == "fire":
            who.fire(listening(processes_with(mark) - own, _inodes(parent)))
            line.send("sent")
    except BaseException as error:  # the test shows it
        who.sent.error = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            line.send("failed")
        while line.recv() != "over":
            line.send("failed")
    line.send(who.sent)
    line.recv()  # until it is killed


# -- what listens ------------------------------------------------------------------------------------------------------


def processes_with(mark: str) -> set[int]:
    """Processes that have inherited a pipe."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if mark in _inodes(int(path.name))}


def listening(pids: set[int], known: set[str]) -> list[Port]:
    """Where processes listen, other than on sockets that are known."""
    inodes = set().union(*(_inodes(pid) for pid in pids)) - known
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *more = row.split()
            if state == "0A" and f"socket:[{more[5]}]" in inodes:
                found.add(Port(family, ("::1" if family == socket.AF_INET6 else "127.0.0.1", int(local[-4:], 16))))
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = row.split(maxsplit=7)
        if len(parts) == 8 and int(parts[3], 16) & 0x10000 and f"socket:[{parts[6]}]" in inodes:
            found.add(Port(socket.AF_UNIX, re.sub("^@", "\0", parts[7])))
    return sorted(found, key=repr)


def _inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it has ended
        for path in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(path.path))
    return found


def _inode(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


# -- what is sent ------------------------------------------------------------------------------------------------------


@dataclass
class Stranger:
    """Sends damaged frames; see `stranger`."""

    charge: Charge
    store: int
    volley: int
    rng: random.Random
    last: str
    sent: Sent = field(default_factory=Sent)
    names: dict[Port, str] = field(default_factory=dict)
    open: deque[socket.socket] = field(default_factory=lambda: deque(maxlen=LEFT_OPEN))
    history: deque[bytes] = field(default_factory=lambda: deque(maxlen=64))
    other: Secret = field(default_factory=Secret.make)

    def fire(self, ports: list[Port]) -> None:
        """A volley at each port."""
        self._name([port for port in ports if port not in self.names])
        for port in ports:
            name = self.names[port]
            for number in range(min(self.volley, MOST_AT_GLOO) if name == GLOO else self.volley):
                self._shoot(port, name, DAMAGES[number % len(DAMAGES)])

    def _name(self, ports: list[Port]) -> None:
        """What listens at each, by who speaks first, and who answers to the hello of a rank."""
        with ExitStack() as ends:
            streams = {port: ends.enter_context(_connected(port)) for port in ports}
            first = _heard(streams)
            for port, stream in streams.items():
                if port not in first:
                    with suppress(ConnectionError):
                        stream.sendall(struct.pack("!4sI32s", b"LPH1", 1, bytes(32)))
            answers = _heard({port: stream for port, stream in streams.items() if port not in first})
        for port in ports:
            self.names[port] = self._name_of(port, first.get(port), answers.get(port))

    def _name_of(self, port: Port, first: bytes | None, answer: bytes | None) -> str:
        if port.address[1] == self.store:
            return "store"
        if port.family == socket.AF_UNIX:
            return "hub's file" if first is None else "servers' file"
        if first is not None:
            return "servers' port"
        return "watch" if answer is not None and len(answer) == 32 else self.last

    def _shoot(self, port: Port, name: str, damage: str) -> None:
        self.sent.frames[name] += 1
        self.sent.damages[damage] += 1
        try:
            stream = _connected(port)
            if damage == "of another run" and name == "watch":
                self._prove_another(stream)
            else:
                stream.sendall(self.frame(damage))
        except (ConnectionError, TimeoutError, BlockingIOError):
            self.sent.broken[name] += 1
            return
        if self.rng.random() < 0.1:
            if len(self.open) == LEFT_OPEN:
                self.open.popleft().close()
            self.open.append(stream)
        else:
            if self.rng.random() < 0.5:  # a reset instead of an end
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.close()

    def _prove_another(self, stream: socket.socket) -> None:
        """The proof of another run's rank."""
        stream.setblocking(False)
        try:
            drive(stream, connect(stream, self.other.key("watch"), 1), 10.0)
        except ConnectionError:
            stream.close()
            raise
        raise AssertionError("the watch has taken another run's proof for its own's")

    def frame(self, damage: str) -> bytes:
        """Bytes for one connection."""
        rng, pieces = self.rng, self.rng.choice(BEGINNINGS)()
        forged = self._forged()
        whole = b"".join([*pieces, forged])
        if damage == "cut off":
            whole = whole[: rng.randrange(len(whole))]
        elif damage == "oversized":
            whole = b"".join(pieces) + rng.choice(HUGE) + forged + bytes(1 << 16)
        elif damage == "replayed":
            whole = rng.choice(self.history) if self.history and rng.random() < 0.5 else 2 * whole
        elif damage == "out of order":
            parts = [*pieces, forged]
            rng.shuffle(parts)
            whole = b"".join(parts)
        elif damage == "noise":
            whole = rng.randbytes(rng.randrange(1, 1 << 12))
        self.history.append(whole)
        return whole

    def _forged(self) -> bytes:
        """A pickle in the frame that some listener would read."""
        blob = pickle.dumps(self.rng.choice((self.charge, ("beat", self.charge), (self.charge, 0, None))))
        said = self.rng.choice((b"", b"FP", b"P")) + blob
        heads = (
            b"", struct.pack("!I", len(said)), struct.pack("!i", len(said)), struct.pack("!H", len(said)),
            struct.pack("<Q", len(said)), struct.pack("!I", 1) + struct.pack("!I", len(said)),
            bytes([0, len(said) % 256]),
        )  # fmt: skip
        return self.rng.choice(heads) + said + self.rng.choice((b"", bytes(32)))


def _heard(streams: dict[Port, socket.socket]) -> dict[Port, bytes]:
    """What comes from those who speak, or end, before the time is over."""
    poller, found, deadline = select.poll(), {}, time.monotonic() + ANSWER_S
    ports = {stream.fileno(): port for port, stream in streams.items()}
    for descriptor in ports:
        poller.register(descriptor, select.POLLIN)
    while len(found) < len(ports) and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(1000 * left):
            poller.unregister(descriptor)
            try:
                found[ports[descriptor]] = streams[ports[descriptor]].recv(64)
            except ConnectionError:
                found[ports[descriptor]] = b""
    return found


def _connected(port: Port) -> socket.socket:
    stream = socket.socket(port.family)
    stream.settimeout(10.0)
    try:
        stream.connect(port.address)
    except BaseException:
        stream.close()
        raise
    return stream


def rank_hello() -> Pieces:
    """Of a rank at the watch, with the proof of another run."""
    return [struct.pack("!4sI", b"LPH1", 1), b"\x01" * 32, b"\x02" * 32]


def worker_hello() -> Pieces:
    """Of no worker at the hub: such a number has none."""
    said = b'["worker", -1, 7]'
    return [struct.pack("!H", len(said)), said]


def zeromq() -> Pieces:
    """The beginning of a connection without a password."""
    return [greeting(b"NULL"), READY]


def password() -> Pieces:
    """The same with another job's password."""
    return [greeting(b"PLAIN"), HELLO]


def tls() -> Pieces:
    """The first flight of somebody who connects by TLS."""
    said, context = ssl.MemoryBIO(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return [said.read()]


def store() -> Pieces:
    """A client of torch's store that is about to set a value."""
    return [struct.pack("<BI", 0, 0x3C85F7CE), struct.pack("<BQ", 1, 8) + b"stranger"]


BEGINNINGS: tuple[Callable[[], Pieces], ...] = (list, rank_hello, worker_hello, zeromq, password, tls, store)
HUGE = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x02" + b"\x3f" + b"\xff" * 7, b"\xff" * 7 + b"\x3f")
