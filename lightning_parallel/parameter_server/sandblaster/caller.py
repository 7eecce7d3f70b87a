"""The coordinator's side: calls on ranges, and batches shared out in portions; each said again until it is done.

The one idea: calls and batches are numbered, and a number is done once, so saying it again is safe. Left out: which
calls (``lbfgs.py``), who does portions (``helper.py``), waiting.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.trust import for_coordinator, of_manager


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
        self.foreign = 0  # messages that their sender may not say, or that cannot be
        self.values: dict[int, float] = {}
        self.vectors: dict[int, Tensor] = {}  # what a range was asked to show
        self.refusal = ""  # why a range does not do the call
        self.batch: m.Batch | None = None  # the last one; None before the manager has said how many there were
        self.total: float | None = 0.0  # of the last batch, once it is done
        self._asked: list[m.Call | m.Read] = []
        self.lost = self.leaving = False  # the manager has let this one go; this one goes
        self._seed: Tensor | None = None
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
        """When ``Wake`` is due next; never once the manager has let this one go."""
        return None if self.lost else self._wake_at

    def leave(self) -> list[m.Message]:
        """Go, in order."""
        self.leaving = True
        return [self._to(MANAGER, m.Leave())]

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
        self._number()
        layout = self.rules.layout
        parts = [None] * layout.num_ranges if vector is None else [part.clone() for part in layout.split(vector)]
        self._asked = [m.Call(key, self.request, words, part, batch, portion) for key, part in enumerate(parts)]
        return self._again()

    def _number(self) -> None:
        self.request, self.values, self.vectors, self.refusal = self.request + 1, {}, {}, ""

    def share(self, count: int) -> list[m.Message]:
        """Have the batch that the last call began done in portions; ``total`` is the sum of their values, once it is
        there."""
        assert self.batch is not None
        self.batch, self.total = m.Batch(self.batch.batch + 1, count), None
        return [self._to(MANAGER, self.batch)]

    def ask_number(self) -> list[m.Message]:
        """Ask the manager for the number of the last batch, which another coordinator may have named."""
        return [self._to(MANAGER, m.Batch(0, 0))]

    def seed(self, vector: Tensor) -> list[m.Message]:
        """Offer the first weights, again and again until every range has answered something; the first that come
        count."""
        self._seed = vector.clone()
        return self._offer()

    def _offer(self) -> list[m.Message]:
        if self._seed is None or not self.view.chains:
            return []
        parts = self.rules.layout.split(self._seed)
        return [self._to(self.view.chains[key][0], m.Seed(key, part)) for key, part in enumerate(parts)]

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message; see ``Server.handle``."""
        body = message.body
        if not self._believes(message):
            self.foreign += 1
            return []
        if isinstance(body, m.View) and body.number > self.view.number:
            self.view = body
            return self._again()
        if isinstance(body, m.Refused):
            self.lost = True
        if isinstance(body, m.Value) and body.request == self.request:
            self._valued(body)
        if isinstance(body, m.Batch) and self.batch is None:
            self.batch = body
        if isinstance(body, m.Done) and self.batch is not None and body.batch == self.batch.batch:
            self.total = body.value
        if isinstance(body, m.Wake) and now >= self._wake_at:
            self._wake_at = now + min(self.rules.heartbeat, self.rules.resend_after)
            return [self._to(MANAGER, self._sign_of_life()), *self._again()]
        return []

    def _believes(self, message: m.Message) -> bool:
        body, layout = message.body, self.rules.layout
        if isinstance(body, m.View) and (len(body.chains) != layout.num_ranges or not all(body.chains.values())):
            return False
        if isinstance(body, m.Value) and body.request == self.request:
            return for_coordinator(message.source, body, self.view, layout)
        return of_manager(message)

    def _sign_of_life(self) -> m.Body:
        """What the manager hears now and then, and what it must not have missed."""
        if not self.view.number:
            return self._hello()
        if self.leaving:
            return m.Leave()
        if self.batch is None:
            return m.Batch(0, 0)
        return self.batch if self.total is None else m.Lease()

    def _valued(self, value: m.Value) -> None:
        self.values[value.key] = value.value
        self.refusal = value.refusal or self.refusal
        if value.values is not None:
            self.vectors[value.key] = value.values
        if self.is_answered:
            self._seed = None

    def _again(self) -> list[m.Message]:
        missing = [one for one in self._asked if one.key not in self.values] if self.view.chains else []
        return self._offer() + [
            self._to(self.view.chains[one.key][-1 if isinstance(one, m.Read) else 0], one) for one in missing
        ]

    def _to(self, target: str, body: m.Body) -> m.Message:
        return m.Message(self.address, target, self.view.number, body)


class ServerShards:
    """Ranges on servers, for a coordinator.

    Args:
        caller: the coordinator's state machine.
        do: calls its first argument with the time, sends what that gives, and returns once its second is true.
    """

    def __init__(
        self, caller: Caller, do: Callable[[Callable[[float], list[m.Message]], Callable[[], bool]], None]
    ) -> None:
        self.caller, self.do = caller, do

    def call(self, *words: str | float, vector: Tensor | None = None) -> float:
        """Do a call on every range: the results' sum, of ``max`` the largest.

        Raises:
            ValueError: there is no such call, or no such vector.
        """
        self._ask(words, vector)
        results = self.caller.values.values()
        return max(results) if words[0] == "max" else sum(results)

    def share(self, count: int) -> float:
        """Sum the results of a batch's portions in ``g``, each once, and return the sum of their values."""
        caller = self.caller
        if caller.batch is None:
            self.do(lambda now: caller.ask_number(), lambda: caller.batch is not None)
        assert caller.batch is not None
        self._ask(("zero", "g", "x"), batch=caller.batch.batch + 1)
        self.do(lambda now: caller.share(count), lambda: caller.total is not None)
        assert caller.total is not None
        return caller.total

    def _ask(self, words: tuple[str | float, ...], vector: Tensor | None = None, batch: int = 0) -> None:
        self.do(lambda now: self.caller.ask(words, vector, batch), lambda: self.caller.is_answered)
        if self.caller.refusal:
            raise ValueError(self.caller.refusal)
