"""A worker of a coordinator: takes portions of a batch while it is idle, and sends each result to all ranges.

    Idle -> manager -> Portion -> Read -> all tails -> Value(x) -> (compute)
         -> Call(add) -> all heads -> Value -> Finished -> manager -> Counted -> Idle

The one idea: a result is with all ranges before the manager hears of it, and a range adds a portion once, so it does
not matter who does a portion, how often, or who dies over it. The point at which a portion is computed comes from the
ranges, where it stays as it is until the batch is over. Left out: what is computed.
"""

from __future__ import annotations

from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.sandblaster.caller import Caller
from lightning_parallel.parameter_server.server.chain import MANAGER


class Helper(Caller):
    """The state machine of a worker that does portions; see ``Caller`` for the arguments."""

    def __init__(self, address: str, rules: Rules, token: str = "", endpoint: str = "") -> None:
        super().__init__(address, rules, token, endpoint)
        self.role = "helper"
        self.portion: m.Portion | None = None  # what is to be done
        self.vector: Tensor | None = None  # where: ``x`` of the portion's batch, shape (size,), float64
        self.first = 0  # portions in which it was the first
        self.prefers = -1  # the portion whose rows are at hand
        self._value: float | None = None  # of the result that is on its way

    @property
    def has_work(self) -> bool:
        """Whether a portion waits for its result, and the point at which it is computed is there."""
        return self.portion is not None and self.vector is not None and self._value is None

    def give(self, vector: Tensor, value: float) -> list[m.Message]:
        """The result of the portion in hand.

        Args:
            vector: shape (size,), float32 or float64, added to ``g`` on the ranges.
            value: what the portion came to, such as its loss.
        """
        assert self.has_work and self.portion is not None
        self._value = value
        return self.ask(("add", "g"), vector, self.portion.batch, self.portion.portion)

    def skip(self) -> list[m.Message]:
        """Leave the portion in hand: its batch is over."""
        assert self.has_work
        self._value = 0.0
        return [self._to(MANAGER, self._sign_of_life())]

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message; see ``Server.handle``."""
        before = self.foreign
        out, body = super().handle(message, now), message.body
        if self.foreign > before:
            return out
        if isinstance(body, m.Portion) and self.portion is None:
            self.portion = body
            out += self._read(body.batch)
        elif isinstance(body, m.Counted) and m.Portion(body.batch, body.portion) == self.portion:
            self.first += body.first
            self.portion = self.vector = self._value = None
            out.append(self._to(MANAGER, self._sign_of_life()))
        elif isinstance(body, m.View) or (isinstance(body, m.Value) and self._is_with_all):
            out.append(self._to(MANAGER, self._sign_of_life()))
        if self.portion is not None and self.vector is None and len(self.vectors) == self.rules.layout.num_ranges:
            self.vector = self.rules.layout.join(self.vectors)
        return out

    def _read(self, batch: int) -> list[m.Message]:
        """Ask the tails for ``x``."""
        self._number()
        keys = range(self.rules.layout.num_ranges)
        self._asked = [m.Read(key, self.request, "x", batch) for key in keys]
        return self._again()

    @property
    def _is_with_all(self) -> bool:
        return self._value is not None and self.is_answered

    def _sign_of_life(self) -> m.Body:
        if not self.view.number:
            return self._hello()
        if self.leaving:
            return m.Leave()
        if self.portion is None:
            return m.Idle(self.prefers)
        if self._value is not None and self.is_answered:
            return m.Finished(self.portion.batch, self.portion.portion, self._value)
        return m.Lease()
