"""Sums of gradients over the ranks that hold a parameter, begun while backwards run.

The one idea: a gradient is added up once, over all ranks that have a part of it: those of this copy of the model
(replicas of a stage, tied weights), and, where the optimizer steps after the batch, those of all other copies. An
all-reduce gives all of them the same bits, so what begins equal stays equal. What was sent is compared with what the
step ends with: a gradient that grew later (a reentrant checkpoint hands over a shared weight's gradient in parts, a
hook changes what accumulates) makes all ranks add up anew, and leave sums to the step's end from then on.
Source: Li and Hoefler, Chimera, arXiv 2107.06925, section 3.2 (gradient synchronization as soon as the local gradients
are there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.gradients.buckets import BucketSum, buckets, views
from lightning_parallel.pipeline.gradients.early_sums import Round
from lightning_parallel.pipeline.gradients.fresh_gradients import FreshGradients
from lightning_parallel.pipeline.gradients.sum_order import plan, shares_of
from lightning_parallel.pipeline.parameters.table import ParameterEntry, ParameterTable
from lightning_parallel.pipeline.schedule import Schedule

Groups = Mapping[tuple[int, ...], Any]  # a process group for each set of rows, by sorted rows
_Finals = dict[int, list[nn.Parameter]]


class _GradientBucket(NamedTuple):
    """Parameters whose gradients travel together, and the ranks that add them up."""

    group: Any
    content: list[tuple[ParameterEntry, nn.Parameter]]


class GradientSums:
    """The sums that a rank begins before its step ends.

    Args:
        table: the parameters.
        gradients: what a step makes, and what it adds to.
        holders: the groups within this copy of the model; nothing is summed within it where there are none.
        copies: the groups over all copies, also for each row alone; nobody else talks over these.
        comes_unseen: whether some of a parameter's gradient is made where no hook is called, or after an action; it
            waits for a backward's end.
        comes_late: whether it is made after an action, also after a W.

    Attributes:
        over_copies: whether this step's sums are over all copies.
    """

    def __init__(
        self,
        table: ParameterTable,
        gradients: FreshGradients,
        holders: Groups,
        copies: Groups,
        comes_unseen: Callable[[nn.Parameter], bool] = lambda parameter: False,
        comes_late: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        self._table, self._gradients, self._groups = table, gradients, {False: holders, True: copies}
        self._comes_unseen, self._comes_late = comes_unseen, comes_late
        self._parameters = dict(table.own())
        self._plans: dict[Any, tuple[_Finals, list[_GradientBucket]]] = {}
        self._by_first: dict[nn.Parameter, _GradientBucket] = {}
        self._under_way: list[tuple[list[_SentGradient], BucketSum]] = []
        self._is_off = {over_copies: not groups for over_copies, groups in self._groups.items()}
        self.over_copies = False

    def begin(self, schedule: Schedule, over_copies: bool) -> Round | None:
        """A step begins; what it returns sends buckets in the order in which all ranks send theirs.

        Args:
            schedule: of the step.
            over_copies: whether the optimizer steps after it, and all copies know that.

        Returns:
            None where gradients are summed at the step's end.
        """
        self._under_way.clear()
        self.over_copies = over_copies and not self._is_off[True]
        if self._is_off[self.over_copies]:
            return None
        trains = tuple(parameter.requires_grad for parameter in self._parameters.values())
        key = schedule, self.over_copies, trains
        if key not in self._plans:
            self._plans[key] = self._plan(schedule)
        finals, coming = self._plans[key]
        parameters = [[parameter for _, parameter in bucket.content] for bucket in coming]
        self._by_first = {held[0]: bucket for held, bucket in zip(parameters, coming, strict=True)}
        return Round(schedule.actions[self._table.row], finals, parameters, self)

    def _plan(self, schedule: Schedule) -> tuple[_Finals, list[_GradientBucket]]:
        """For each action of this rank the parameters whose gradients are final with it; all buckets in order."""
        finals: _Finals = {}
        found: list[_GradientBucket] = []
        for action, share in plan(schedule, shares_of(self._table, self.over_copies), self._table.row):
            held = [(entry, self._parameters[entry]) for entry in share.entries]
            trained = [pair for pair in held if pair[1].requires_grad][::-1]  # as a backward makes them
            rest, group = iter(trained), self._groups[self.over_copies][tuple(sorted(share.rows))]
            found += [
                _GradientBucket(group, [next(rest) for _ in bucket]) for bucket in buckets([p for _, p in trained])
            ]
            finals.setdefault(action, []).extend(parameter for _, parameter in trained)
        return finals, found

    # -- what a round asks ---------------------------------------------------------------------------------------------

    def may_be_early(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's hooks are called with all of its gradient."""
        return not self._comes_unseen(parameter)

    def may_leave_in_weights(self, parameter: nn.Parameter) -> bool:
        """Whether a W makes all that is left of its gradient."""
        return not self._comes_late(parameter)

    def send(self, bucket: list[nn.Parameter]) -> None:
        """Begin the sum of a bucket: what the step made, and over copies what it is added to.

        Raises:
            ValueError: a gradient is sparse.
        """
        group, content = self._by_first[bucket[0]]
        given = [self._given(entry, parameter) for entry, parameter in content]
        self._under_way.append((given, BucketSum([gradient.whole() for gradient in given], group)))

    def _given(self, entry: ParameterEntry, parameter: nn.Parameter) -> _SentGradient:
        """What of a gradient goes into a sum now."""
        fresh = parameter.grad
        refuse_sparse(entry, fresh)
        adds = self.over_copies and entry.is_counted_on(self._table.row)  # all holders have all that accumulated
        before = self._gradients.before(parameter) if adds else None
        return _SentGradient(parameter, fresh, adds, before, (_version(fresh), _version(before)))

    # -- the end of a step ---------------------------------------------------------------------------------------------

    @property
    def num_sent(self) -> int:
        """How many buckets of this step are on their way."""
        return len(self._under_way)

    def is_stale(self, fresh: Mapping[nn.Parameter, Tensor | None]) -> bool:
        """Before anything is added to `grad`: is what was sent no longer what the step made?"""
        return any(part.is_stale(fresh.get(part.parameter)) for given, _ in self._under_way for part in given)

    def take(self, stale: bool) -> dict[nn.Parameter, Tensor]:
        """The sums, by parameter; none where some rank's were stale. A model that does this once does so always."""
        sums = {
            part.parameter: total
            for given, bucket in self._under_way
            for part, total in zip(given, bucket.wait(), strict=True)
        }
        self._under_way.clear()
        self._is_off[self.over_copies] |= stale
        self.over_copies = False
        return {} if stale else sums

    def cancel(self) -> None:
        """The sums of a step that begins anew are of no use."""
        self.take(stale=False)


class _SentGradient(NamedTuple):
    """What of a parameter's gradient went into a sum, and in which state it was."""

    parameter: nn.Parameter
    fresh: Tensor | None
    adds: bool  # to what accumulated before
    before: Tensor | None
    versions: tuple[int, int]

    def whole(self) -> Tensor:
        """This rank's part of the gradient with which the optimizer steps."""
        if self.fresh is None or self.before is None:
            there = self.before if self.fresh is None else self.fresh
            return torch.zeros_like(self.parameter) if there is None else there
        return self.before + self.fresh

    def is_stale(self, fresh: Tensor | None) -> bool:
        """Whether something changed since."""
        before = self.parameter.grad if self.adds else None
        now = (_version(fresh), _version(before))
        return fresh is not self.fresh or before is not self.before or now != self.versions


def refuse_sparse(entry: ParameterEntry, gradient: Tensor | None) -> None:
    """Raise for a gradient that cannot be added up with other ranks'."""
    if gradient is not None and gradient.layout != torch.strided:
        raise ValueError(f"The gradient of `{entry.name}` is sparse, which ranks do not add up. Use sparse=False.")


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def equalize_gradients(table: ParameterTable, ranks: Sequence[int], groups: Mapping[tuple[int, ...], Any]) -> None:
    """Give every rank the first holder's `grad` of what several hold: means over copies of the model may round apart,
    where they were taken in groups and buckets of a rank's own.

    Args:
        table: the parameters.
        ranks: the global rank of each row.
        groups: see `GradientSums`.
    """
    for share in shares_of(table):
        if table.row in share.rows:
            gradients = [table.model.get_parameter(entry.name).grad for entry in share.entries]
            for bucket in buckets([gradient for gradient in gradients if gradient is not None]):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.broadcast(flat, ranks[share.rows[0]], group=groups[tuple(sorted(share.rows))])
                for gradient, value in zip(bucket, views(flat, bucket), strict=True):
                    gradient.copy_(value)
