"""How workers on other hosts find the hub of a run, and are known to belong to it.

The one idea: the user sets one secret for all hosts. The hub takes only connections that prove it, which are encrypted,
and the keys by which workers and servers encrypt what they say are made of it, so that they travel nowhere.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from ssl import SSLSocket
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_parallel.handshake import Unproven
from lightning_parallel.mesh import open_store
from lightning_parallel.parameter_server.trainer.coordination.hello import Introduction, hear, say
from lightning_parallel.parameter_server.trainer.coordination.reception import Arrival
from lightning_parallel.parameter_server.transport.sealed import AnyConnection, SealedConnection, seal
from lightning_parallel.secret import SECRET, Secret
from lightning_parallel.strangers import PATIENCE_S, Waits, drive

if TYPE_CHECKING:
    from lightning_parallel.parameter_server.job import Job
    from lightning_parallel.parameter_server.transport.keys import CurveKeys

_LATEST = "lightning_parallel/latest_hub"
_IDLE_S, _BETWEEN_S, _PROBES = 5, 2, 3  # so a host whose cable is out is missed after 11 s
_TRIES, _AGAIN_S = 3, 0.1  # of who was turned away, as happens where too many come at once


@dataclass(frozen=True)
class Hosts:
    """What the processes of a run on several hosts share.

    Args:
        address: of the hub's host.
        secret: of the run.
        store: where the hub's port is.
    """

    address: str
    secret: Secret
    store: dist.Store

    @classmethod
    def meet(cls, address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Hosts:
        """Find the others through torch's store.

        Raises:
            ValueError: there is no secret.
        """
        secret = Secret.of_run()
        if secret is None:
            raise ValueError(
                f"A parameter server on several hosts takes nobody in who does not know its secret, and {SECRET} is not"
                " set. Set it to the same 16 or more characters on all hosts, such as what `openssl rand -hex 32`"
                f" prints, or {SECRET}_FILE to a file of mode 600 that holds them."
            )
        return cls(socket.gethostbyname(address), secret, open_store(address, port, rank, world_size, timeout))

    def listen(self, count: int, run: int) -> socket.socket:
        """The hub's end, for so many, on a free port that the others are told, and who comes to an earlier run."""
        listener = socket.create_server((self.address, 0), backlog=max(count, 1024))
        port = listener.getsockname()[1]
        self.store.set("hub", str(port))
        self._script.set(_LATEST, f"{run} {port}")
        return listener

    @property
    def _script(self) -> dist.Store:
        """The store that all runs of the script have in common."""
        return self.store.underlying_store if isinstance(self.store, dist.PrefixStore) else self.store

    @property
    def latest(self) -> tuple[int, int]:
        """The number and the port of the script's latest run; zeros if there was none."""
        if not self._script.check([_LATEST]):
            return 0, 0
        run, port = map(int, self._script.get(_LATEST).split())
        return run, port

    def greet(self, stream: socket.socket) -> Waits[Arrival]:
        """Take in who belongs here."""
        tls = yield from seal(stream, self._key, listens=True)
        try:
            hello = yield from hear(tls)
        except BaseException:
            tls.close()
            raise
        line = SealedConnection(tls)
        keep_alive(line)
        return Arrival(line, hello)

    @property
    def port(self) -> int:
        """Where the hub listens, once it does."""
        return int(self.store.get("hub"))

    def connect(self, port: int, hello: Introduction, seconds: float = PATIENCE_S) -> SealedConnection:
        """A connection to the hub, which has heard who comes.

        Raises:
            ValueError: this host has another secret.
            ConnectionRefusedError: there is no hub.
            OSError: it does not answer in so many seconds.
        """
        for again in reversed(range(_TRIES)):
            try:
                return self._connect(port, hello, seconds)
            except Unproven as error:
                if not again:
                    raise ValueError(
                        f"{SECRET} is another one on {self.address}. Set the same on all hosts."
                    ) from error
                time.sleep(_AGAIN_S)
        raise AssertionError

    def _connect(self, port: int, hello: Introduction, seconds: float) -> SealedConnection:
        deadline = time.monotonic() + seconds
        with socket.create_connection((self.address, port), timeout=seconds) as stream:
            tls = drive(stream, self._come(stream, hello), deadline - time.monotonic())
        line = SealedConnection(tls)
        keep_alive(line)
        return line

    def _come(self, stream: socket.socket, hello: Introduction) -> Waits[SSLSocket]:
        tls = yield from seal(stream, self._key, listens=False)
        try:
            yield from say(tls, hello)
        except BaseException:
            tls.close()
            raise
        return tls

    @property
    def _key(self) -> bytes:
        return self.secret.key("hub")

    @property
    def keys(self) -> CurveKeys:
        """CURVE keys of the run."""
        import zmq
        from zmq.utils import z85

        from lightning_parallel.parameter_server.transport.keys import CurveKeys

        own = z85.encode(self.secret.key("servers"))
        return CurveKeys(zmq.curve_public(own), own)

    def place(self, job: Job, connection: AnyConnection) -> Job:
        """A job's values for a process of this host, which reached the hub by this connection."""
        with _socket_of(connection) as own:
            return replace(job, host=own.getsockname()[0], keys=self.keys)


def keep_alive(connection: AnyConnection) -> None:
    """Have the end of a connection seen whose other host is silent."""
    with _socket_of(connection) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _BETWEEN_S * _PROBES))


def watch(connection: AnyConnection, gone: Callable[[], None]) -> None:
    """Have a function called, in a thread, when the other end is gone, while nobody reads from the connection."""

    def look() -> None:
        with suppress(OSError):  # it was closed here
            while not connection.closed:
                ends = select.poll()
                ends.register(connection.fileno(), select.POLLRDHUP)
                if ends.poll(1000):
                    gone()
                    return

    threading.Thread(target=look, name="hub", daemon=True).start()


def _socket_of(connection: AnyConnection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
