"""The coordinator's side: calls on ranges, and batches shared out in portions; each said again until it is done.

The one idea: calls and batches are numbered, and a number is done once, so saying it again is safe. Left out: which
calls (``sandblaster.py``), who does portions (``helper.py``), waiting.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_parallel.server import messages as m
from lightning_parallel.server.chain import MANAGER
from lightning_parallel.server.rules import Rules


class Caller:
    """The state machine of a coordinator.

    Args:
        address: how others name it; new for every start.
        rules: the job's agreement.
        token: proof that it belongs to the job.
        endpoint: where a transport finds it.
    """

    def __init__(self, address: str, rules: Rules, token: str = "", endpoint: str = "") -> None:
        self.address, self.rules, self.token, self.endpoint = address, rules, token, endpoint
        self.view, self.request, self.role = m.View(), 0, "coordinator"
        self.values: dict[int, float] = {}
        self.batch = m.Batch(0, 0)
        self.total: float | None = 0.0  # of the last batch, once it is done
        self._asked: list[m.Call] = []
        self._wake_at = 0.0

    def start(self, now: float) -> list[m.Message]:
        """What a coordinator says first."""
        self._wake_at = now + self.rules.heartbeat
        return [self._to(MANAGER, self._hello())]

    def _hello(self) -> m.Hello:
        return m.Hello(self.role, self.address, self.token, self.endpoint)

    def place(self, message: m.Message) -> None:
        """What is on its way may lie anywhere."""

    @property
    def wake_at(self) -> float | None:
        """When ``Wake`` is due next."""
        return self._wake_at

    @property
    def is_answered(self) -> bool:
        """Whether every range has done the call."""
        return len(self.values) == len(self._asked) > 0

    def ask(
        self, words: tuple[str | float, ...], vector: Tensor | None = None, batch: int = 0, portion: int = -1
    ) -> list[m.Message]:
        """Send a call to every range; ``values`` has what it came to, once ``is_answered``.

        Args:
            words: the call, see ``sandblaster.perform``.
            vector: shape (size,), what the call takes along.
            batch: what the call begins or, with a portion, is of.
            portion: whose result it is.
        """
        self.request, self.values = self.request + 1, {}
        layout = self.rules.layout
        parts = [None] * layout.num_ranges if vector is None else [part.clone() for part in layout.split(vector)]
        self._asked = [m.Call(key, self.request, words, part, batch, portion) for key, part in enumerate(parts)]
        return self._again()

    def share(self, count: int) -> list[m.Message]:
        """Have the batch that the last call began done in portions; ``total`` is the sum of their values, once it is
        there."""
        self.batch, self.total = m.Batch(self.batch.batch + 1, count), None
        return [self._to(MANAGER, self.batch)]

    def seed(self, vector: Tensor) -> list[m.Message]:
        """Offer the first weights."""
        parts = self.rules.layout.split(vector)
        return [self._to(self.view.chains[key][0], m.Seed(key, part.clone())) for key, part in enumerate(parts)]

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message; see ``Server.handle``."""
        body = message.body
        if isinstance(body, m.View) and body.number > self.view.number:
            self.view = body
            return self._again()
        if isinstance(body, m.Value) and body.request == self.request:
            self.values[body.key] = body.value
        if isinstance(body, m.Done) and body.batch == self.batch.batch:
            self.total = body.value
        if isinstance(body, m.Wake) and now >= self._wake_at:
            self._wake_at = now + min(self.rules.heartbeat, self.rules.resend_after)
            return [self._to(MANAGER, self._sign_of_life()), *self._again()]
        return []

    def _sign_of_life(self) -> m.Body:
        """What the manager hears now and then, and what it must not have missed."""
        if not self.view.number:
            return self._hello()
        return self.batch if self.total is None else m.Lease()

    def _again(self) -> list[m.Message]:
        missing = [call for call in self._asked if call.key not in self.values]
        return [self._to(self.view.chains[call.key][0], call) for call in missing if self.view.chains]

    def _to(self, target: str, body: m.Body) -> m.Message:
        return m.Message(self.address, target, self.view.number, body)


class ServerShards:
    """Ranges on servers, for a coordinator.

    Args:
        caller: the coordinator's state machine.
        send: puts messages on their way.
        wait: returns once what it is given is true.
    """

    def __init__(
        self, caller: Caller, send: Callable[[list[m.Message]], None], wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self.caller, self.send, self.wait = caller, send, wait

    def call(self, *words: str | float, vector: Tensor | None = None) -> float:
        """Do a call on every range: the results' sum, of ``max`` the largest."""
        self.send(self.caller.ask(words, vector))
        self.wait(lambda: self.caller.is_answered)
        results = self.caller.values.values()
        return max(results) if words[0] == "max" else sum(results)

    def share(self, count: int) -> float:
        """Sum the results of a batch's portions in ``g``, each once, and return the sum of their values."""
        self.send(self.caller.ask(("zero", "g", "x"), batch=self.caller.batch.batch + 1))
        self.wait(lambda: self.caller.is_answered)
        self.send(self.caller.share(count))
        self.wait(lambda: self.caller.total is not None)
        assert self.caller.total is not None
        return self.caller.total
