"""State machines in processes of their own, over pyzmq: a ROUTER to listen (``inbox.py``), a DEALER to each peer
(``link.py``).

The one idea: a process waits in one place, for a message, a credit or the time that its machine has named, and reacts
to what is there. Loopback and ipc only, unless there are keys; on loopback whoever connects says a password. Left out:
starting processes (``launcher.py``), waiting for results (``session.py``).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2s
from pathlib import Path
from typing import cast

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.transport.inbox import Inbox
from lightning_parallel.parameter_server.transport.keys import CurveKeys, is_local
from lightning_parallel.parameter_server.transport.link import QUEUE, PeerLink
from lightning_parallel.parameter_server.transport.password import Password
from lightning_parallel.parameter_server.transport.pyzmq import zmq
from lightning_parallel.parameter_server.transport.slab import Slab, SlabReader
from lightning_parallel.parameter_server.transport.virtual import Machine

LONGEST_STAY = 6  # times `patience` that a link to a process that has left may still have something to send


class Node:
    """A state machine with sockets.

    Args:
        machine: ``Manager``, ``Server`` or ``Client``.
        job: secret number of the job, 64 bits.
        endpoint: where to listen; ``tcp://127.0.0.1:*`` takes a free port.
        book: address -> endpoint of those that are known from the start.
        most: bytes that one message may have.
        slab: this process's shared memory; without it everything that it sends goes through sockets.
        shared: where other processes' shared memory is.
        keys: needed where an endpoint is reached from other hosts.
        patience: seconds without a credit after which a connection is made anew.
        borrows: see ``Inbox``.
        queue: messages that wait for one peer at most.

    Raises:
        ValueError: the endpoint is reached from other hosts and there are no keys.
    """

    def __init__(
        self,
        machine: Machine,
        job: int,
        endpoint: str,
        book: dict[str, str],
        most: int = 1 << 32,
        slab: Slab | None = None,
        shared: Path | None = None,
        keys: CurveKeys | None = None,
        patience: float = 5.0,
        borrows: bool = False,
        queue: int = QUEUE,
    ) -> None:
        if not is_local(endpoint) and keys is None:
            raise ValueError(
                f"{endpoint} is reached from other hosts. Give keys=Keys.make(), the same to all processes."
            )
        self.machine, self.job, self.book, self.keys, self.slab = machine, job, dict(book), keys, slab
        self.patience, self.queue, self.counts = patience, queue, Counter[str]()
        self.context, self.poller = zmq.Context(), zmq.Poller()
        self.links: dict[str, PeerLink] = {}
        self._number = time.time_ns()  # of the next message; one that is started again goes on above the last
        self._learnt = 0
        self._left: dict[str, float] = {}  # whom the manager may still answer though they have left, and since when
        router = self.context.socket(zmq.ROUTER)
        reader = SlabReader(shared) if shared else None
        self.inbox = Inbox(router, job, most, self.counts, reader, borrows, machine.place)
        self._password = Password(self.context, job)
        if (proof := self.proof(endpoint)) is not None:
            proof.listen(router)
        try:
            router.bind(endpoint)
        except BaseException:
            router.close(0)
            self.context.term()
            raise
        self.endpoint = cast(bytes, router.last_endpoint).decode().rstrip("\0")
        self.poller.register(router, zmq.POLLIN)

    def send(self, messages: list[m.Message]) -> None:
        """Put messages on their way."""
        self.learn()
        for message in messages:
            if message.target == self.machine.address:
                self.send(self.machine.handle(message, self.now()))
            elif (link := self._link(message.target)) is not None:
                self._number += 1
                link.put(message, self._number)
            else:
                self.counts["unreachable"] += 1

    def _link(self, target: str) -> PeerLink | None:
        """The way to a peer, made when it is needed first; None if nobody said where it is."""
        link, endpoint = self.links.get(target), self.book.get(target)
        if link is None and endpoint is not None and (self.keys is not None or is_local(endpoint)):
            slab = self.slab if endpoint.startswith("ipc://") else None
            me, poller, proof, patience = self.machine.address, self.poller, self.proof(endpoint), self.patience
            try:
                link = PeerLink(
                    self.context, me, endpoint, self.job, self.counts, poller, slab, proof, patience, self.queue
                )
            except zmq.ZMQError:  # there is no such place
                return None
            self.links[target] = link
            if self.machine.address == MANAGER and self._learnt and target not in self.machine.view.endpoints:
                self._left[target] = self.now()
        return link

    def proof(self, endpoint: str) -> CurveKeys | Password | None:
        """How ends of a connection show each other that they are of this job; the file system keeps ipc."""
        return self.keys or (self._password if endpoint.startswith("tcp://") else None)

    def learn(self) -> None:
        """Take endpoints from the machine's view, and close what leads to those that are gone."""
        view = self.machine.view
        if view.number == self._learnt:
            return
        self._learnt = view.number
        self.book |= view.endpoints
        gone = [a for a in self.links if a not in view.endpoints and a != MANAGER]
        if self.machine.address == MANAGER:
            self._left = {address: self._left.get(address, self.now()) for address in gone}
            return
        for address in gone:
            self._forget(address)

    def _forget(self, address: str) -> None:
        self.links.pop(address).close()
        if self.inbox.shared is not None:
            self.inbox.shared.forget(address)

    def _close_left(self) -> None:
        """Close the manager's links to those that have left, once nothing waits there or they have stayed too long."""
        now = self.now()
        for address, since in list(self._left.items()):
            link, stayed = self.links[address], now - since
            is_idle = not link.has_more and not link.expects
            if stayed > (self.patience if is_idle else LONGEST_STAY * self.patience):
                del self._left[address]
                self._forget(address)

    @staticmethod
    def now() -> float:
        """Seconds, of a clock that never goes back."""
        return time.monotonic()

    def pump(self, timeout: float) -> bool:
        """Wait at most so many seconds for a message, and react; whether there was one."""
        due = self.machine.wake_at
        wait = timeout if due is None else min(timeout, max(0.0, due - self.now()))
        links = list(self.links.values())
        if any(link.waits for link in links):
            blocked = any(link.blocked for link in links)
            self.poller.poll(math.ceil(1e3 * min(wait, 0.005 if blocked else 1.0)))
            wait = 0.0
        message = self.inbox.receive(wait)
        for link in links:
            if link.expects:
                link.credits()
            if link.has_more:
                link.push()
        got = message is not None
        if message is not None:
            self._handle(message)
        del message  # and with it what it has borrowed
        self.inbox.give_back()
        if self._left:
            self._close_left()
        if due is not None and self.now() >= due:
            self.send(self.machine.handle(m.Message("", self.machine.address, 0, m.Wake()), self.now()))
        return got

    def _handle(self, message: m.Message) -> None:
        if message.source in ("", self.machine.address):
            self.inbox.refuse("a message in nobody's name, or in its reader's")
            return
        if isinstance(message.body, m.Hello) and message.body.endpoint:
            self.book.setdefault(message.source, message.body.endpoint)
        self.send(self.machine.handle(message, self.now()))

    def run(self, until: Callable[[], bool]) -> None:
        """Pump until something is the case."""
        while not until():
            self.pump(0.2)

    def close(self) -> None:
        """Close everything."""
        for link in self.links.values():
            link.close()
        self.inbox.router.close(0)
        self.context.term()
        if self.slab is not None:
            self.slab.close()


def endpoint_in(folder: Path, address: str) -> str:
    """An ipc endpoint in a folder of the job: a file named by a hash of the address, since its path is to be short."""
    return f"ipc://{folder / blake2s(address.encode(), digest_size=5).hexdigest()}"
