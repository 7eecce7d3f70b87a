"""A state machine with sockets, driven by whoever waits for it.

The one idea: whoever waits in a call drives the sockets; while nobody does, a thread looks in now and then, so that
the lease is kept while the process computes. Left out: what is waited for (``session.py``, ``errands.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_parallel.parameter_server.messages import Message
from lightning_parallel.parameter_server.sandblaster.caller import Caller
from lightning_parallel.parameter_server.transport.zeromq import Node
from lightning_parallel.parameter_server.worker.client import Client


class LeaseLostError(RuntimeError):
    """The manager took this process for gone: what it sends counts no more."""


class Driver:
    """What drives a state machine that has a ``lost``, a ``rules`` and a ``leave``.

    Args:
        node: the state machine with sockets.
        timeout: seconds after which a call that has no answer raises.
    """

    def __init__(self, node: Node, timeout: float = 120.0) -> None:
        self.node, self.timeout = node, timeout
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_lease, name="lease", daemon=True)

    @property
    def _machine(self) -> Client | Caller:
        machine = self.node.machine
        assert isinstance(machine, (Client, Caller))
        return machine

    @property
    def _lost(self) -> bool:
        return self._machine.lost

    def _settle(self) -> None:
        """What must be over before this process may leave."""

    def _enter(self, start: Callable[[float], list[Message]]) -> None:
        """Join the job; sockets of one that cannot be joined are closed."""
        try:
            self._do(start, lambda: self._machine.view.number > 0)
        except BaseException:
            self.node.close()
            raise

    def close(self) -> None:
        """Leave in order: nobody waits for this worker any more."""
        try:
            if not self._lost:
                self._settle()
                self._do(lambda now: self._machine.leave(), lambda: self._lost, may_be_lost=True)
        finally:
            self._over.set()
            self._thread.join()
            self.node.close()

    def _do(
        self,
        start: Callable[[float], list[Message]],
        until: Callable[[], bool] = lambda: True,
        may_be_lost: bool = False,
        look_s: float = 0.2,
    ) -> None:
        deadline = self.node.now() + self.timeout
        with self._lock:
            self.node.send(start(self.node.now()))
            while not until():
                if self._lost and not may_be_lost:
                    break
                if self.node.now() > deadline:
                    raise TimeoutError(f"{self._machine.address} got no answer in {self.timeout} s.")
                self.node.pump(look_s)
        if self._lost and not may_be_lost:
            raise LeaseLostError(
                f"{self._machine.address} was silent for longer than its lease of {self._machine.rules.lease} s, or a "
                f"worker of the same name has taken its place. Start a new session to join again."
            )

    def _keep_lease(self) -> None:
        while not self._over.wait(min(0.2, self._machine.rules.heartbeat / 2)):
            with self._lock:
                while self.node.pump(0.0):
                    pass
