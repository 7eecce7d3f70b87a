"""A worker's client with sockets, and calls that return when there is something to return. Left out: what to push."""

from __future__ import annotations

from torch import Tensor

from lightning_parallel.parameter_server.transport.driver import Driver, LeaseLostError
from lightning_parallel.parameter_server.transport.zeromq import Node
from lightning_parallel.parameter_server.worker.client import Client
from lightning_parallel.parameter_server.worker.reading import Result

__all__ = ["LeaseLostError", "WorkerSession"]


class WorkerSession(Driver):
    """What a worker's training loop talks to.

    Args:
        node: a ``Client`` with sockets.
        timeout: seconds after which a call that has no answer raises.
    """

    def __init__(self, node: Node, timeout: float = 120.0) -> None:
        super().__init__(node, timeout)
        assert isinstance(node.machine, Client)
        self.client = node.machine

    def start(self, initial: Tensor | None = None) -> WorkerSession:
        """Join the job and offer first weights; the first that come count."""
        self._enter(self.client.start)
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

    def _settle(self) -> None:
        self.settle()

    def await_replicas(self) -> None:
        """Wait until no range is to be copied any more: from then on as many servers may die as the rules say."""
        self._do(lambda now: [], lambda: bool(self.client.view.chains) and not self.client.view.joining)

    def settle(self) -> None:
        """Wait until every push is with all replicas."""
        self._do(lambda now: [], lambda: self.client.is_settled)
