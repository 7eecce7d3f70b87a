"""A worker's client with sockets, and calls that return when there is something to return.

The one idea: whoever waits in a call drives the sockets; while nobody does, a thread looks in now and then, so that
the lease is kept while the worker computes. Left out: what to push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from lightning_parallel.server.client import Client
from lightning_parallel.server.messages import Message
from lightning_parallel.server.reading import Result
from lightning_parallel.server.transport.zeromq import Node


class LeaseLostError(RuntimeError):
    """The manager took this worker for gone: what it pushes counts no more."""


class Session:
    """What a worker's training loop talks to.

    Args:
        node: a ``Client`` with sockets.
        timeout: seconds after which a call that has no answer raises.
    """

    def __init__(self, node: Node, timeout: float = 120.0) -> None:
        assert isinstance(node.machine, Client)
        self.node, self.client, self.timeout = node, node.machine, timeout
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_lease, name="lease", daemon=True)

    def start(self, initial: Tensor | None = None) -> Session:
        """Join the job and offer first weights; the first that come count."""
        self._do(lambda now: self.client.start(now), lambda: self.client.view.number > 0)
        if initial is not None:
            self._do(lambda now: self.client.seed(initial))
        self._thread.start()
        return self

    def pull(self) -> Result:
        """The weights, as fresh as the rules want them.

        Raises:
            LeaseLostError: the manager took this worker for gone.
            TimeoutError: no answer came in time.
        """
        self._do(self.client.pull, self._has_result)
        return self._result

    def _has_result(self) -> bool:
        return self.client.result is not None

    @property
    def _result(self) -> Result:
        assert self.client.result is not None
        return self.client.result

    def push(self, vector: Tensor | None, tick: bool = True, lr: float | None = None, copy: bool = True) -> None:
        """Send an update, see ``Client.push``; returns once it is on its way, and waits where too many are.

        Raises:
            LeaseLostError: the manager took this worker for gone.
            TimeoutError: there was no room in time.
        """
        self._make_room()
        self._do(lambda now: self.client.push(vector, now, tick, lr, copy))

    def push_pull(self, vector: Tensor | None, tick: bool = True, lr: float | None = None, copy: bool = True) -> Result:
        """Send an update and return the weights after it: ``push`` and ``pull`` in one round trip where they can be.

        Raises:
            LeaseLostError: the manager took this worker for gone.
            TimeoutError: no answer came in time.
        """
        self._make_room()
        self._do(lambda now: self.client.push_pull(vector, now, tick, lr, copy), self._has_result)
        return self._result

    def _make_room(self) -> None:
        if not self.client.may_push:
            self._do(lambda now: [], lambda: self.client.may_push)

    def settle(self) -> None:
        """Wait until every push is with all replicas."""
        self._do(lambda now: [], lambda: self.client.is_settled)

    def close(self) -> None:
        """Leave in order: nobody waits for this worker any more."""
        try:
            if not self.client.lost:
                self.settle()
                self._do(lambda now: self.client.leave(), lambda: self.client.lost, may_be_lost=True)
        finally:
            self._over.set()
            self._thread.join()
            self.node.close()

    def _do(
        self,
        start: Callable[[float], list[Message]],
        until: Callable[[], bool] = lambda: True,
        may_be_lost: bool = False,
    ) -> None:
        deadline = self.node.now() + self.timeout
        with self._lock:
            self.node.send(start(self.node.now()))
            while not until():
                if self.client.lost and not may_be_lost:
                    break
                if self.node.now() > deadline:
                    raise TimeoutError(f"{self.client.address} got no answer in {self.timeout} s.")
                self.node.pump(0.2)
        if self.client.lost and not may_be_lost:
            raise LeaseLostError(
                f"{self.client.address} was silent for longer than its lease of {self.client.rules.lease} s, or a "
                f"worker of the same name has taken its place. Start a new session to join again."
            )

    def _keep_lease(self) -> None:
        while not self._over.wait(min(0.2, self.client.rules.heartbeat / 2)):
            with self._lock:
                while self.node.pump(0.0):
                    pass
