"""A worker of a coordinator: takes portions of a batch while it is idle, and sends each result to all ranges.

    Idle -> manager -> Portion -> (compute) -> Call(add) -> all ranges -> Finished -> manager -> Counted -> Idle

The one idea: a result is with all ranges before the manager hears of it, and a range adds a portion once, so it does
not matter who does a portion, how often, or who dies over it. Left out: what is computed.
"""

from __future__ import annotations

from torch import Tensor

from lightning_parallel.server import messages as m
from lightning_parallel.server.caller import Caller
from lightning_parallel.server.chain import MANAGER
from lightning_parallel.server.rules import Rules


class Helper(Caller):
    """The state machine of a worker that does portions; see ``Caller`` for the arguments."""

    def __init__(self, address: str, rules: Rules, token: str = "", endpoint: str = "") -> None:
        super().__init__(address, rules, token, endpoint)
        self.role = "helper"
        self.portion: m.Portion | None = None  # what is to be done
        self.lost = False  # the manager has let this one go
        self.first = 0  # portions in which it was the first
        self._value: float | None = None  # of the result that is on its way

    @property
    def has_work(self) -> bool:
        """Whether a portion waits for its result."""
        return self.portion is not None and self._value is None

    def give(self, vector: Tensor, value: float) -> list[m.Message]:
        """The result of the portion in hand.

        Args:
            vector: shape (size,), added to ``g`` on the ranges.
            value: what the portion came to, such as its loss.
        """
        assert self.has_work and self.portion is not None
        self._value = value
        return self.ask(("add", "g"), vector, self.portion.batch, self.portion.portion)

    def handle(self, message: m.Message, now: float) -> list[m.Message]:
        """React to a message; see ``Server.handle``."""
        out, body = super().handle(message, now), message.body
        if isinstance(body, m.Refused):
            self.lost = True
        elif isinstance(body, m.Portion) and self.portion is None:
            self.portion = body
        elif isinstance(body, m.Counted) and m.Portion(body.batch, body.portion) == self.portion:
            self.first += body.first
            self.portion = self._value = None
            out.append(self._to(MANAGER, self._sign_of_life()))
        elif isinstance(body, m.View) or (isinstance(body, m.Value) and self._is_with_all):
            out.append(self._to(MANAGER, self._sign_of_life()))
        return out

    @property
    def wake_at(self) -> float | None:
        """When ``Wake`` is due next; never once the manager has let this one go."""
        return None if self.lost else super().wake_at

    @property
    def _is_with_all(self) -> bool:
        return self._value is not None and self.is_answered

    def _sign_of_life(self) -> m.Body:
        if not self.view.number:
            return self._hello()
        if self.portion is None:
            return m.Idle()
        if self._value is not None and self.is_answered:
            return m.Finished(self.portion.batch, self.portion.portion, self._value)
        return m.Lease()
