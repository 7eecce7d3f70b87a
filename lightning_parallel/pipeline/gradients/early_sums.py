"""When a step's gradients are final, and which buckets of them leave then.

The one idea: a gradient is final when its stage's last action (a backward, or a W) has made it, however much of that
action is still to come. Buckets are sent in one order on all ranks that share them, each as soon as it and all before
it are final; nobody waits for them before the step's end. Left out: what is sent and to whom (``gradient_sums.py``,
``zero/native/early_reduction.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.schedule import Action, Schedule


def last_action(schedule: Schedule, row: int, stages: Collection[int]) -> int:
    """The number of a row's action with which the gradients of some stages are final; -1 where none makes any."""
    actions = enumerate(schedule.actions[row])
    return max((i for i, action in actions if action.kind in "BIW" and action.stage in stages), default=-1)


class Sender(Protocol):
    """What a `Round` asks to send buckets."""

    def may_be_early(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's hooks are called with all of its gradient."""

    def may_leave_in_weights(self, parameter: nn.Parameter) -> bool:
        """Whether a W makes all that is left of its gradient."""

    def send(self, bucket: list[nn.Parameter]) -> Any:
        """Begin to send a bucket whose gradients are final."""


class Round:
    """One step: which gradients are final, and which buckets were sent.

    Args:
        actions: this rank's.
        finals: for each action, by number, the parameters whose gradients are final with it.
        buckets: of parameters that train, in the order in which they are sent.
        sender: sends.
    """

    def __init__(
        self,
        actions: tuple[Action, ...],
        finals: Mapping[int, list[nn.Parameter]],
        buckets: Sequence[list[Any]],
        sender: Sender,
    ) -> None:
        self.sent: list[Any] = []
        self._finals, self._sender, self._now = finals, sender, set[nn.Parameter]()
        self._by_action = {actions[number]: held for number, held in finals.items() if number >= 0}
        self._buckets = buckets
        self._missing = {parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        self._open = [len(bucket) for bucket in self._buckets]

    @contextmanager
    def backward(self, action: Action) -> Iterator[None]:
        """Around a backward: where it is the last of its stage, gradients are final as it makes them."""
        watched = [p for p in self._by_action.get(action, ()) if p in self._missing and self._sender.may_be_early(p)]
        handles = [parameter.register_post_accumulate_grad_hook(self._made) for parameter in watched]
        self._now = set(watched)
        try:
            yield
        finally:
            self._now = set()
            for handle in handles:
                handle.remove()

    def come_past(self, parameters: Iterable[nn.Parameter]) -> None:
        """A backward has come past these parameters: if it is the last of their stage their gradients are final."""
        for parameter in parameters:
            if parameter in self._now:
                self._made(parameter)

    def weights(
        self, action: Action, waiting: Callable[[], Collection[Tensor]]
    ) -> Callable[[nn.Parameter], None] | None:
        """Before a W, for which the parameters `waiting()` wait: what to call with each that is done."""
        if action not in self._by_action:
            return None
        still = set(waiting())
        finals = {p for p in self._by_action[action] if self._sender.may_leave_in_weights(p)}
        for parameter in self._by_action[action]:
            if parameter in finals and parameter not in still:
                self._made(parameter)
        return lambda parameter: self._made(parameter) if parameter in finals else None

    def after(self, number: int) -> None:
        """An action is over, by its number in the row; -1 before the first."""
        for parameter in self._finals.get(number, ()):
            self._made(parameter)

    @torch.no_grad()
    def _made(self, parameter: nn.Parameter) -> None:
        number = self._missing.pop(parameter, None)
        if number is not None:
            self._open[number] -= 1
        while len(self.sent) < len(self._buckets) and not self._open[len(self.sent)]:
            self.sent.append(self._sender.send(self._buckets[len(self.sent)]))
