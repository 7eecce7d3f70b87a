"""BatchNorm by the statistics of the whole batch: micro-batches wait for each other at every norm.

The one idea: all forwards of a stage come before its backwards, and run in turns (``pipeline/runtime/turns.py``). One
    that comes to a
norm waits there until all have come; then all are normalised together (``parallel/batch_statistics.py``) and go on. So
every micro-batch runs the step as ever, with numbers of its own, and their graphs meet in the norms: one backward goes
through all of them. Statistics may be those of other copies' rows, too. Left out: stages that run backwards before
their last forward, which cannot know the statistics; they are refused.
Source: Huang et al., GPipe, arXiv 1811.06965, section 2.3 (it normalises micro-batches; its running statistics are the
batch's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_parallel.parallel.batch_statistics import (
    AddUp,
    BatchStatistics,
    normalise,
    refuse_one_value,
    scaled,
)
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.runtime.turns import in_turn, meet
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.stage.side_effects import Attributes, is_same

INSTEAD = (
    'Use schedule="gpipe", which runs all forwards of a stage before its backwards; or num_microbatches=1, norms of'
    ' single rows (GroupNorm, LayerNorm), or batch_norm="microbatch", which normalises within micro-batches.'
)


@dataclass
class _Called:
    """What norms did in a step, by their calls."""

    statistics: list[BatchStatistics] = field(default_factory=list)
    with_grad: bool = False


@dataclass(frozen=True)
class _Brought:
    """A micro-batch that has come to a norm."""

    norm: Any
    x: Tensor
    grad: bool
    again: bool


class WholeBatchNorm:
    """The BatchNorms of a model, normalising by the statistics of the whole batch.

    Args:
        model: the model.
        cut: the same, cut.
        stages: those of this rank.
        add_up: sums over the copies of the model whose rows count as one batch, or None.
    """

    def __init__(self, model: nn.Module, cut: CutModel, stages: Sequence[int], add_up: AddUp | None = None) -> None:
        self._cut, self._add_up = cut, add_up
        norms = {
            m: name for name, m in model.named_modules()
            if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)
        }  # fmt: skip
        self._names, self._stage = norms, {m: _stage_of(name, cut) for m, name in norms.items()}
        self._own = [m for m, stage in self._stage.items() if stage is None or stage in stages]
        self._called: dict[Any, _Called] = {}
        self._attributes: Callable[[], Attributes] | None = None
        self._before: Attributes = {}

    def look_at(self, attributes: Callable[[], Attributes] | None) -> None:
        """In this step, see whether micro-batches take each other's tensors in attributes, which this gives."""
        self._attributes, self._before = attributes, {} if attributes is None else attributes()

    def says(self, sizes: Sequence[int]) -> str:
        """What has to be known of norms that are about to train: nothing."""
        return ""

    def joined(self, schedule: Schedule) -> frozenset[int]:
        """The stages whose forwards run in turns, since they have norms that look at the batch.

        Raises:
            ValueError: the schedule runs one's backwards before its last forward.
        """
        if schedule.num_microbatches == 1 and not self._cut.recomputes and self._add_up is None:
            return frozenset()
        looking = {m: stage for m, stage in self._stage.items() if _looks_at_batch(m)}
        everywhere, every = None in looking.values(), range(self._cut.layout.num_stages)
        stages = frozenset(stage for stage in every if everywhere or stage in looking.values())
        if stages:
            late = _backward_before_forward(schedule, max(stages))
            if late is not None or schedule.num_replicas > 1 or len(schedule.placement) > schedule.num_ranks:
                norm = next(self._names[m] for m, stage in looking.items() if stage is None or stage == max(stages))
                why = (
                    f"runs the backward {late[0]} before the forward {late[1]}" if late is not None
                    else "holds several stages on a rank"
                )  # fmt: skip
                raise ValueError(
                    f"The batch norm `{norm}` normalises by the statistics of the whole batch, which are there when"
                    f" all forwards of its stage and of those before have run, and schedule {schedule.name!r} {why}."
                    f" {INSTEAD}"
                )
        return stages

    @contextmanager
    def step(self, num_microbatches: int) -> Iterator[None]:
        """One step of the Trainer."""
        looking = [m for m in self._own if _looks_at_batch(m)]
        if num_microbatches == 1 and not self._cut.recomputes and self._add_up is None:
            looking = []
        self._called = {m: _Called() for m in looking}
        for module in looking:
            module.__dict__["forward"] = torch.compiler.disable(partial(self._forward, module, module.forward))
        try:
            yield
        finally:
            for module in looking:
                del module.__dict__["forward"]
            self._called, self._attributes, self._before = {}, None, {}

    def _forward(self, module: Any, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        run = self._cut.active
        if not _looks_at_batch(module):
            return plain(x)
        if torch._C._current_autograd_node() is not None:
            return self._computed_again(module, x)
        if not in_turn() or isinstance(x, Phantom) or (run is not None and run.going.finding):
            return _row_by_row(module, x)  # only shapes are looked at, or whether rows stay apart
        module._check_input_dim(x)
        left = {} if self._attributes is None else self._attributes()
        found: Tensor = meet(_Brought(module, x, torch.is_grad_enabled(), run is not None and run.again))
        self._refuse_mixed(left)
        return found

    def _refuse_mixed(self, left: Attributes) -> None:
        """What a micro-batch has left in attributes is there when it goes on.

        Raises:
            ValueError: another one's is.
        """
        now = {} if self._attributes is None else self._attributes()
        for where, value in left.items():
            if not is_same(self._before.get(where), value) and not is_same(value, now.get(where)):
                name = ".".join(part for part in ("self", *where) if part)
                raise ValueError(
                    f"The step leaves `{name}` behind before a batch norm, where micro-batches wait for each other:"
                    " what one reads afterwards is another's. Hand it on as an argument, or use num_microbatches=1."
                    " check_loss=False skips this comparison."
                )

    def together(self, brought: Sequence[_Brought]) -> list[Tensor]:
        """Normalise micro-batches that wait at a norm.

        Raises:
            ValueError: they wait at different ones.
        """
        first = brought[0]
        other = next((of for of in brought if of.norm is not first.norm), None)
        if other is not None:
            raise ValueError(
                f"One micro-batch comes to the batch norm `{self._names[first.norm]}`, another to"
                f" `{self._names[other.norm]}`: they take different ways through the model and cannot be normalised"
                " together. Use num_microbatches=1."
            )
        norm, pieces = first.norm, [of.x for of in brought]
        with torch.set_grad_enabled(first.grad):
            statistics = BatchStatistics.of([x.detach() for x in pieces], self._add_up)
            refuse_one_value(statistics, pieces[0])
            called = self._called[norm]
            called.with_grad |= first.grad
            if not first.again:
                called.statistics.append(statistics)
                if norm.training:
                    statistics.update(norm)
            return normalise(pieces, statistics, norm.weight, norm.bias, norm.eps, self._add_up)

    def _computed_again(self, norm: Any, x: Tensor) -> Tensor:
        """What a norm gave in the forward, for a block that is computed again in its backward.

        Raises:
            ValueError: it cannot be told which call that was, or its graph is wanted, which is made in forwards.
        """
        called, name = self._called[norm], self._names[norm]
        if len(called.statistics) != 1 or not called.with_grad:
            what = (
                "by a checkpoint with use_reentrant=True. Use use_reentrant=False" if not called.with_grad
                else f"and was called {len(called.statistics)} times. Keep what is inside it"
            )  # fmt: skip
            raise ValueError(
                f"The batch norm `{name}`, which normalises by the whole batch, is computed again in a backward, {what}"
                ', or recompute="stage", or num_microbatches=1.'
            )
        with torch.no_grad():
            normal = called.statistics[0].normalised(x, norm.eps)
            found = scaled(normal, norm.weight, norm.bias).to(x.dtype)
        trained = any(of is not None and of.requires_grad for of in (x, norm.weight, norm.bias))
        # What follows saves what it saved in the forward, the norm nothing, as there; a clone, to be written into.
        return found.requires_grad_().clone() if trained and torch.is_grad_enabled() else found


def _looks_at_batch(norm: Any) -> bool:
    """Whether it normalises by what it is given."""
    return bool(norm.training or norm.running_mean is None)


def _row_by_row(norm: Any, x: Tensor) -> Tensor:
    """Something that is shaped as what a norm gives, and depends on each row alone."""
    return scaled(x * 1, norm.weight, norm.bias).to(x.dtype)


def _stage_of(name: str, cut: CutModel) -> int | None:
    """The stage of a module; None: every one runs it."""
    around = (unit.stage for unit in cut.layout.units if f"{name}.".startswith(f"{unit.name}."))
    return next(around, None)


def _backward_before_forward(schedule: Schedule, last: int) -> tuple[Any, Any] | None:
    """Of the stages up to `last`, the first backward that comes before a forward of its stage, and that forward."""
    for row in range(schedule.num_ranks):
        backwards: dict[int, Any] = {}
        for action in schedule.actions[row]:
            if action.kind in "BI" and action.stage <= last:
                backwards.setdefault(action.stage, action)
            elif action.kind == "F" and action.stage in backwards:
                return backwards[action.stage], action
    return None
