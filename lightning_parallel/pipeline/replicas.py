"""What ranks that hold the same stage do together, in schedules that run several replicas of a pipeline at once.

The one idea: two replicas of a stage are parameters that several ranks hold. Every rank has the gradients of its own
micro-batches; their sums begin as soon as the rank's last backward of a stage is done, while other stages still work,
or, where that is a W, bucket by bucket while it runs. They are taken when the optimizer wants them. An all-reduce gives
all ranks the same bits, so replicas that begin equal stay equal; `compare` asks, now and then, whether they did.
Source: Li and Hoefler, Chimera, arXiv 2107.06925, section 3.2 (gradient synchronization as soon as the local gradients
are there).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.buckets import BucketSum, buckets, views
from lightning_parallel.pipeline.channel import Waiting, nobody_waits
from lightning_parallel.pipeline.early_sums import Round
from lightning_parallel.pipeline.parameters import Entry, ParameterTable
from lightning_parallel.pipeline.schedule import Action, Schedule


@dataclass(frozen=True)
class Share:
    """Parameters that the same ranks hold for the same stages: their gradients are ready at one moment."""

    stages: tuple[int, ...]
    rows: tuple[int, ...]
    entries: tuple[Entry, ...]


_Finals = dict[int, list[nn.Parameter]]


class _Bucket(NamedTuple):
    """Parameters whose gradients travel together, and the ranks that add them up."""

    group: Any
    content: list[tuple[Entry, nn.Parameter]]


@dataclass
class _Sum:
    """A sum under way: what went into it, with the versions of the gradients, and the all-reduces that run."""

    given: list[tuple[Entry, Tensor | None, int]]
    total: BucketSum
    counts: BucketSum | None


class _Round(Round):
    """One step; within a backward nothing leaves, since a reentrant checkpoint hands over a gradient in parts."""

    @contextmanager
    def backward(self, action: Action) -> Iterator[None]:
        yield


class GradientSums:
    """The sums of gradients over the ranks that hold a parameter.

    Args:
        table: the parameters.
        groups: a process group for each set of rows that shares one, by sorted rows.
        device: where this rank computes.
        waiting: a context entered while this process is blocked.
    """

    def __init__(
        self,
        table: ParameterTable,
        groups: Mapping[tuple[int, ...], Any],
        device: torch.device,
        waiting: Waiting = nobody_waits,
    ) -> None:
        self._table, self._groups, self._device, self._waiting = table, groups, device, waiting
        self._shares = shares_of(table)
        parameters = dict(table.own())
        self._held = {
            share: [(entry, parameters[entry]) for entry in share.entries]
            for share in self._shares
            if table.row in share.rows
        }
        self._plans: dict[tuple[Schedule, tuple[bool, ...]], tuple[_Finals, list[_Bucket]]] = {}
        self._buckets: dict[nn.Parameter, _Bucket] = {}  # by the first of each
        self._under_way: list[_Sum] = []

    def begin(self, schedule: Schedule) -> Round:
        """A step begins; what it returns sends buckets in the order in which all ranks send theirs."""
        self._under_way.clear()
        trains = tuple(parameter.requires_grad for held in self._held.values() for _, parameter in held)
        if (schedule, trains) not in self._plans:
            self._plans[schedule, trains] = self._plan(schedule)
        finals, coming = self._plans[schedule, trains]
        parameters = [[parameter for _, parameter in bucket.content] for bucket in coming]
        self._buckets = {held[0]: bucket for held, bucket in zip(parameters, coming, strict=True)}
        return _Round(schedule.actions[self._table.row], finals, parameters, self)

    def may_be_early(self, parameter: nn.Parameter) -> bool:
        """Whether a W makes all of its gradient known: always."""
        return True

    def _plan(self, schedule: Schedule) -> tuple[_Finals, list[_Bucket]]:
        """For each action of this rank the parameters whose gradients are final with it; all buckets in order."""
        finals: _Finals = {}
        found: list[_Bucket] = []
        for action, share in plan(schedule, self._shares, self._table.row):
            trained = [(entry, parameter) for entry, parameter in self._held[share] if parameter.requires_grad]
            rest, group = iter(trained), self._groups[tuple(sorted(share.rows))]
            together = [_Bucket(group, [next(rest) for _ in bucket]) for bucket in buckets([p for _, p in trained])]
            found += together[::-1]  # as a backward makes them
            finals.setdefault(action, []).extend(parameter for _, parameter in trained)
        return finals, found

    def cancel(self) -> None:
        """The sums of a step that begins anew are of no use."""
        for under_way in self._under_way:
            for bucket in (under_way.total, under_way.counts):
                if bucket is not None:
                    bucket.wait()
        self._under_way.clear()

    def send(self, bucket: list[nn.Parameter]) -> None:
        """Begin the sum of a bucket."""
        group, content = self._buckets[bucket[0]]
        given = [(entry, p.grad, -1 if p.grad is None else p.grad._version) for entry, p in content]
        for entry, gradient, _ in given:
            if gradient is not None and gradient.is_sparse:
                raise ValueError(
                    f"The gradient of `{entry.name}` is sparse, which replicas of a stage do not add up. Use"
                    " sparse=False, or a schedule of one direction."
                )
        here = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for _, p in content]
        total, counts = BucketSum(here, group), None
        if self._device.type == "cpu" or any(entry.bare for entry, _ in content):
            made = torch.tensor([float(gradient is not None) for _, gradient, _ in given], device=self._device)
            counts = BucketSum([made], group)
        self._under_way.append(_Sum(given, total, counts))

    def collect(self, gradients: dict[str, Tensor | None]) -> None:
        """Put the sums in the place of this rank's own gradients, by first name; None stays where no rank made one.

        On a CUDA device a unit's parameters count as used, since to ask would make hosts wait for devices.

        Raises:
            ValueError: a gradient grew after its sum had begun.
        """
        for under_way in self._under_way:
            self._refuse_late(under_way, gradients)
            with self._waiting("the ranks that hold the same stage, to add up gradients"):
                totals = under_way.total.wait()
                counts = [1.0] * len(totals) if under_way.counts is None else under_way.counts.wait()[0].tolist()
            for (entry, _, _), total, count in zip(under_way.given, totals, counts, strict=True):
                gradients[entry.name] = total if count else None
        self._under_way.clear()

    def _refuse_late(self, under_way: _Sum, gradients: Mapping[str, Tensor | None]) -> None:
        for entry, before, version in under_way.given:
            now = gradients.get(entry.name)
            if now is not before or (now is not None and now._version != version):
                raise ValueError(
                    f"Parameter `{entry.name}` of stage {entry.stages[0]} got a gradient from another stage's backward:"
                    " the step uses it outside its module. Compute such a term from a module's own forward, or use the"
                    " optimizer's weight_decay, or a schedule of one direction."
                )


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


def shares_of(table: ParameterTable) -> list[Share]:
    """The parameters that several ranks hold, in the order of the model, gathered by stages and rows."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Entry]] = {}
    for entry in table.shared():
        found.setdefault((entry.stages, entry.rows), []).append(entry)
    return [Share(stages, rows, tuple(entries)) for (stages, rows), entries in found.items()]


def plan(schedule: Schedule, shares: Sequence[Share], row: int) -> list[tuple[int, Share]]:
    """The shares of a row in the order in which all rows begin their sums, each with the action it waits for.

    Rows that share several things begin their sums in one order, or they would wait for each other: that in which the
    last of all rows' backwards come in an order that serves every dependency.

    Returns:
        (number of the action in the row, -1 for none; share), in order.
    """
    numbers = {step.action.key: number for number, step in enumerate(schedule.order)}

    def last(share: Share, of: int) -> tuple[int, int]:
        """When a row's last backward of a share is: in the order of all actions, and in the row."""
        ends = [
            (numbers[action.key], at)
            for at, action in enumerate(schedule.actions[of])
            if action.stage in share.stages and action.kind in "BIW"
        ]
        return max(ends, default=(-1, -1))

    held = sorted(
        (max(last(share, of) for of in share.rows)[0], number, share)
        for number, share in enumerate(shares)
    )  # fmt: skip
    return [(last(share, row)[1], share) for _, _, share in held if row in share.rows]
