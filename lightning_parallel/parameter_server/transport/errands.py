"""A coordinator of portions, and the helpers that do them, with sockets (Sandblaster).

The one idea: a coordinator's ``shards`` are what ``sandblaster.LBFGS`` works on, and a helper is a function of the
point and the number of a portion; neither says where a vector lies. Left out: which problem.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_parallel.parameter_server.sandblaster.caller import Caller, ServerShards
from lightning_parallel.parameter_server.sandblaster.helper import Helper
from lightning_parallel.parameter_server.transport.driver import Driver
from lightning_parallel.parameter_server.transport.zeromq import Node

_LOOK_S = 0.005
Compute = Callable[[Tensor, int], tuple[float, Tensor]]


class Errands(Driver):
    """What a coordinator and a helper have in common.

    Args:
        node: a ``Caller`` with sockets.
        timeout: seconds after which a call that has no answer raises.
    """

    def __init__(self, node: Node, timeout: float = 120.0) -> None:
        super().__init__(node, timeout)
        assert isinstance(node.machine, Caller)
        self.caller = node.machine

    def _start(self, initial: Tensor | None) -> None:
        self._enter(self.caller.start)
        if initial is not None:
            self._do(lambda now: self.caller.seed(initial))
        self._thread.start()


class Coordination(Errands):
    """A coordinator: ``LBFGS(coordination.shards, lambda: coordination.shards.share(portions)).run()``."""

    def start(self, initial: Tensor | None = None) -> Coordination:
        """Join the job and offer first weights; the first that come count, so helpers may offer them as well."""
        self._start(initial)
        return self

    @property
    def shards(self) -> ServerShards:
        """The ranges, for calls and batches."""
        return ServerShards(self.caller, self._do)


class Helping(Errands):
    """A helper.

    Args:
        node: a ``Helper`` with sockets.
        timeout: seconds after which a call that has no answer raises.
    """

    def __init__(self, node: Node, timeout: float = 120.0) -> None:
        super().__init__(node, timeout)
        assert isinstance(node.machine, Helper)
        self.helper = node.machine

    def start(self, initial: Tensor | None = None) -> Helping:
        """Join the job and offer first weights; the first that come count."""
        self._start(initial)
        return self

    def work(self, compute: Compute) -> int:
        """Do portions until none has come for ``timeout`` seconds.

        Args:
            compute: takes the point, shape (size,), float64, and the portion's number; gives the portion's value and
                its gradient, shape (size,), float32 or float64.

        Returns:
            In how many portions this helper was the first.

        Raises:
            LeaseLostError: the manager took this helper for gone.
        """
        while self._has_work():
            portion, vector = self.helper.portion, self.helper.vector
            assert portion is not None and vector is not None
            self._give(*compute(vector, portion.portion))
        return self.helper.first

    def next(self, over: Callable[[], bool], after: int = 0) -> tuple[int, Tensor] | None:
        """The next portion and its point, shape (size,), float64; None once something is over.

        Args:
            over: looked at often.
            after: a batch that is over, with all before it; what is left of them is not done.

        Raises:
            LeaseLostError: the manager took this helper for gone.
        """
        while True:
            self._do(lambda now: [], lambda: self.helper.has_work or over(), look_s=_LOOK_S)
            portion, vector = self.helper.portion, self.helper.vector
            if not self.helper.has_work or portion is None or vector is None:
                return None
            if portion.batch > after:
                return portion.portion, vector
            self._do(lambda now: self.helper.skip())

    def give(self, value: float, gradient: Tensor) -> None:
        """The portion's value and its gradient, shape (size,), float32 or float64."""
        self._give(value, gradient)

    def _give(self, value: float, gradient: Tensor) -> None:
        self._do(lambda now: self.helper.give(gradient, value))

    def _has_work(self) -> bool:
        try:
            self._do(lambda now: [], lambda: self.helper.has_work)
        except TimeoutError:
            return False
        return True
