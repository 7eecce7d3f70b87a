"""Sums of gradients over the copies of a model that begin while the last backward of a stage still runs.

The one idea: a gradient is final when its stage's last action (a backward, or a W) has made it, however much of that
action is still to come. Buckets are sent in one order on all copies, from the last stage to the first and from a
stage's last parameter to its first, each as soon as it and all before it are final; nobody waits for them before the
step's end. What was sent is compared with what the step ends with: a gradient that grew later (a reentrant checkpoint
hands over a shared weight's gradient in parts, a hook changes what accumulates) makes all copies add up anew. Left out:
parameters that several ranks of a copy hold, whose gradients are summed over these first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.buckets import BucketSum, buckets
from lightning_parallel.pipeline.gradients import FreshGradients
from lightning_parallel.pipeline.parameters import ParameterTable
from lightning_parallel.pipeline.schedule import Action, Schedule


class EarlySums:
    """The sums over the copies that a rank begins before its step ends.

    Args:
        table: the parameters.
        gradients: what a step makes, and what it adds to.
        group: the ranks that hold this rank's stages in all copies; nobody else talks over it.
        comes_unseen: whether some of a parameter's gradient is made where no hook is called, or after an action; it
            waits for an action's end.

    Attributes:
        stale: whether the step ended with other gradients than were sent.
    """

    def __init__(
        self,
        table: ParameterTable,
        gradients: FreshGradients,
        group: Any,
        comes_unseen: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        alone = [(entry, parameter) for entry, parameter in table.own() if len(entry.rows) == 1]
        self._own = sorted(alone, key=lambda pair: pair[0].stages[0])[::-1]
        self._row, self._gradients, self._group, self._comes_unseen = table.row, gradients, group, comes_unseen
        self._plans: dict[Schedule, dict[int, list[nn.Parameter]]] = {}
        self._round: Round | None = None
        self._is_on, self.stale = True, False

    def begin(self, schedule: Schedule) -> Round | None:
        """A step begins after which the optimizer updates; None where its gradients are better summed at the end."""
        self._round, self.stale = None, False
        if self._is_on:
            if schedule not in self._plans:
                self._plans[schedule] = self._plan(schedule)
            actions, finals = schedule.actions[self._row], self._plans[schedule]
            self._round = Round(actions, finals, list(buckets([p for _, p in self._own if p.requires_grad])), self)
        return self._round

    @property
    def num_sent(self) -> int:
        """How many buckets of this step are on their way."""
        return 0 if self._round is None else len(self._round.sent)

    def _plan(self, schedule: Schedule) -> dict[int, list[nn.Parameter]]:
        """For each action of this row the parameters whose gradients are final with it; -1 where none makes any."""
        finals: dict[int, list[nn.Parameter]] = {}
        for entry, parameter in self._own:
            finals.setdefault(last_action(schedule, self._row, entry.stages), []).append(parameter)
        return finals

    def may_be_early(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's hooks are called with all of its gradient."""
        return not self._comes_unseen(parameter)

    def send(self, bucket: list[nn.Parameter]) -> tuple[list[_Given], BucketSum]:
        """Begin the sum of a bucket: what the step made, and what it is added to."""
        given = [_Given.of(parameter, self._gradients.before(parameter)) for parameter in bucket]
        return given, BucketSum([gradient.whole() for gradient in given], self._group)

    def compare(self, fresh: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Before anything is added to `grad`: is what was sent what the step made?"""
        sent = self._round.sent if self._round is not None else []
        self.stale = any(gradient.is_stale(fresh.get(gradient.parameter)) for given, _ in sent for gradient in given)

    def take(self, stale: bool) -> dict[nn.Parameter, Tensor]:
        """The sums, by parameter; none where a copy's were stale. A model that does this once does so always."""
        over, self._round = self._round, None
        sums = {
            gradient.parameter: total
            for given, bucket in (over.sent if over is not None else [])
            for gradient, total in zip(given, bucket.wait(), strict=True)
        }
        self._is_on &= not stale
        return {} if stale else sums


def last_action(schedule: Schedule, row: int, stages: Collection[int]) -> int:
    """The number of a row's action with which the gradients of some stages are final; -1 where none makes any."""
    actions = enumerate(schedule.actions[row])
    return max((i for i, action in actions if action.kind in "BIW" and action.stage in stages), default=-1)


class Sender(Protocol):
    """What a `Round` asks to send buckets."""

    def may_be_early(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's hooks are called with all of its gradient."""

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
        finals = {parameter for parameter in self._by_action[action] if self._sender.may_be_early(parameter)}
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


class _Given(NamedTuple):
    """What of a parameter's gradient went into a sum, and in which state it was."""

    parameter: nn.Parameter
    fresh: Tensor | None
    before: Tensor | None
    versions: tuple[int, int]

    @classmethod
    def of(cls, parameter: nn.Parameter, before: Tensor | None) -> _Given:
        """What is there now.

        Raises:
            ValueError: it is sparse.
        """
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError("A gradient is sparse, which the data axis does not average. Use sparse=False.")
        return cls(parameter, parameter.grad, before, (_version(parameter.grad), _version(before)))

    def whole(self) -> Tensor:
        """The gradient with which the optimizer would step without other copies."""
        if self.fresh is None or self.before is None:
            there = self.before if self.fresh is None else self.fresh
            return torch.zeros_like(self.parameter) if there is None else there
        return self.before + self.fresh

    def is_stale(self, fresh: Tensor | None) -> bool:
        """Whether something changed since."""
        now = (_version(fresh), _version(self.parameter.grad))
        return fresh is not self.fresh or self.parameter.grad is not self.before or now != self.versions


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
