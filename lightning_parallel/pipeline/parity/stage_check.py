"""Is what every stage makes of a batch what it makes of its micro-batches? Asked once, of every stage.

The one idea: the micro-batches, and the whole batch, go through all stages once more, one after the other, without
gradients, with modules in evaluation mode and random numbers held still. What a stage hands on for the whole batch has
to be what it handed on for the micro-batches, joined; the last stage's loss and logged numbers are compared by their
weights (``loss_check.py``). The first stage that differs tries the fields of the batch one by one, each whole, cut or
emptied, and names the one that makes the difference. What differs less than a router that jumps at one token, but more
than rounding, is looked at again in float64, where no router jumps and a row that reads another still does. Left out:
values whose shapes follow from the rows' contents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_parallel.pipeline.batch.fields import Cutting, Name
from lightning_parallel.pipeline.parity.fixed_random import FixedRandom
from lightning_parallel.pipeline.parity.in_float64 import in_float64
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.stage.cut import ActiveRun
from lightning_parallel.pipeline.stage.rounds import Handed, Rounds
from lightning_parallel.pipeline.stage.snapshot import untouched
from lightning_parallel.pipeline.stage.stage_run import StageRun
from lightning_parallel.pipeline.stage.stage_values import Place
from lightning_parallel.pipeline.transport.channel import Channel

Step = Callable[[], Any]
Change = Literal["whole", "rows", "empty"]  # a field goes whole to every micro-batch, is cut, or is zero
Change_of = Callable[[Name, Change], "tuple[Sequence[Step], Step]"]
_MOST_FIELDS = 16  # that are tried


@dataclass
class Looked:
    """What one stage came to in one pass.

    Attributes:
        handed: what was handed to it.
        outputs: what it hands on, by place.
        result: of the last stage, what `Judge.look` made of the step's result.
    """

    handed: Handed
    outputs: dict[Place, Tensor]
    result: Any = None


class Judge(Protocol):
    """Compares what is told of the last stage's results."""

    def look(self, result: Any) -> Any:
        """What is compared of what a step returned."""

    def differs(self, parts: Sequence[Any], whole: Any, exactly: bool = False) -> str:
        """What is wrong with that of the whole batch beside that of all micro-batches; ""; exactly: see `Rounding`."""

    def doubts(self, parts: Sequence[Any], whole: Any) -> bool:
        """Whether something differs that may do so, unless a field of the batch is the reason."""

    def warn(self, parts: Sequence[Any], whole: Any, again: Any) -> None:
        """Say what differs and may do so; `again`: the first micro-batch with other random numbers."""


@dataclass
class Fields:
    """The fields of the batch that is compared.

    Attributes:
        found: how they are cut.
        declared_whole: those with entries that were declared to go whole to every micro-batch.
        rows: of the batch.
        change: gives the micro-batches' steps and that of the whole batch with one field changed.
    """

    found: Cutting
    rows: int
    change: Change_of
    declared_whole: Mapping[Name, Any] = field(default_factory=dict)

    def trials(self, at_loss: bool = False) -> list[tuple[Name, Change]]:
        """What may make the difference; at the loss not the batch's first field, with all of which any loss is that of
        the whole batch."""
        names = [name for name, count in self.found.entries.items() if count == 1][int(at_loss) :]
        cut: list[tuple[Name, Change]] = [(name, "whole") for name in names]
        whole = {**self.found.whole, **self.declared_whole}
        rows: list[tuple[Name, Change]] = [
            (name, "rows") for name, leaf in whole.items() if len(leaf) > self.rows and not len(leaf) % self.rows
        ]
        empty: list[tuple[Name, Change]] = [(name, "empty") for name, leaf in whole.items() if isinstance(leaf, Tensor)]
        return [*cut[:_MOST_FIELDS], *rows[:_MOST_FIELDS], *empty[:_MOST_FIELDS]]

    def words(self, name: Name, change: Change) -> str:
        """What is said of a field whose change makes all equal, with a remedy."""
        shown, of = ".".join(name), {**self.found.whole, **self.declared_whole}.get(name)
        if change == "whole":
            return (
                f"The field {shown!r} of the batch has {self.rows} entries, as many as the batch has rows, and was cut;"
                " with all of it in every micro-batch there is no difference. Say"
                f' PipelineStrategy(batch_fields={{"{shown}": "whole"}}).'
            )
        has = f"{tuple(of.shape)}, {of.dtype}" if isinstance(of, Tensor) else f"{len(of or ())} entries"
        if change == "rows":
            return (
                f"The field {shown!r} of the batch ({has}) has another number of entries than the batch has rows and"
                " went whole to every micro-batch; cut row by row it makes no difference. Say"
                f' PipelineStrategy(batch_fields={{"{shown}": "rows"}}).'
            )
        return (
            f"It reads the field {shown!r} of the batch ({has}), which has no entry for every row: every micro-batch"
            " got all of it, and it does not mean the same to a part of the rows as to all. Give every row its own (a"
            " mask, positions), or use num_microbatches=1."
        )


class StageCheck:
    """Compares the stages of this rank, and all ranks their findings.

    Args:
        rounds: knows how micro-batches go through stages one by one.
        executors: this rank's stages.
        all_gather: gives every rank's object to every rank of the copy.
        judge: of the last stage.
        rounding: of values.
    """

    def __init__(
        self,
        rounds: Rounds,
        executors: Sequence[StageExecutor],
        all_gather: Callable[[Any], list[Any]],
        judge: Judge,
        rounding: Rounding,
    ) -> None:
        self.rounds, self.cut, self.all_gather = rounds, rounds.cut, all_gather
        self.judge, self.rounding = judge, rounding
        self._unsaid: Callable[[], None] | None = None  # what is warned of where nothing is wrong
        self._exactly = False  # everything computes in float64
        self._failure = ""  # why that could not be
        self.executors = sorted(executors, key=lambda executor: executor.stage)

    def compare(self, work: StepWork, whole: Step, sizes: Sequence[int], fields: Fields) -> bool:
        """Compare all stages; all ranks of the copy call it.

        Args:
            work: the step on all micro-batches, which has run once.
            whole: the step on the whole batch.
            sizes: rows of each micro-batch.
            fields: the batch's.

        Returns:
            Whether the device's memory sufficed for it.

        Raises:
            ValueError: a stage makes something else of the whole batch, or cannot run it.
        """
        windows, self.cut.windows = self.cut.windows, None  # all is whole in the first step of a kind
        observer, Channel.observer = Channel.observer, None  # nothing of this is a step's traffic
        try:
            with torch.no_grad(), untouched(self.cut.model), self.rounds.without_graphs():
                self.cut.model.eval()
                units = self._learn(work, whole)
                passes = self._all(work, whole, units)
                found, suspects = self._findings(work, passes, sizes, fields)
                if not any(found.values()) and any(suspects.values()):
                    found = self._again_exactly(work, whole, units, sizes, fields, suspects)
        finally:
            self.cut.windows, Channel.observer, self._exactly = windows, observer, False
        first = next((stage for stage in sorted(found) if found[stage]), None)
        if first is None:
            if self._unsaid is not None:
                self._unsaid()
            return all(passes[executor.stage][-1] is not None for executor in self.executors)
        if first in passes:
            raise ValueError(found[first])
        self.all_gather(None)  # that stage's rank says what is wrong
        raise AssertionError("the rank of that stage has raised")

    def _findings(
        self, work: StepWork, passes: Mapping[int, Sequence[Looked | None]], sizes: Sequence[int], fields: Fields
    ) -> tuple[dict[int, str], dict[int, str]]:
        """What is wrong with each stage of the copy, and what differs more than rounding and less than that."""
        mine = {}
        for executor in self.executors:
            said = self._finding(executor, work, passes[executor.stage], sizes, fields)
            mine[executor.stage] = said, "" if said else self._suspects(executor, work, passes[executor.stage], sizes)
        told = {stage: both for of in self.all_gather(mine) for stage, both in of.items()}
        return {stage: said for stage, (said, _) in told.items()}, {stage: seen for stage, (_, seen) in told.items()}

    def _again_exactly(
        self, work: StepWork, whole: Step, units: Sequence[dict[str, Any]], sizes: Sequence[int], fields: Fields,
        suspects: Mapping[int, str],
    ) -> dict[int, str]:  # fmt: skip
        """The findings in float64; what cannot compute so is warned of."""
        self._exactly = True
        passes = self._all(work, whole, units)
        found, _ = self._findings(work, passes, sizes, fields)
        failures = [said for said in self.all_gather(self._failure) if said]
        if failures and not any(found.values()):
            first = min(stage for stage, seen in suspects.items() if seen)
            self._unsaid = partial(_warn_of_suspects, suspects[first], failures[0], self._unsaid)
        return found

    def _learn(self, work: StepWork, whole: Step) -> list[dict[str, Any]]:
        """What units return in each pass."""
        known = [self.rounds.known(signature) for signature in work.signatures]
        return [*known, self.rounds.find(replace(work, steps=[whole]), 0)[1] if known[0] else {}]

    def _all(self, work: StepWork, whole: Step, units: Sequence[dict[str, Any]]) -> dict[int, list[Looked | None]]:
        """Every micro-batch, and the whole batch at last, through this rank's stages."""
        passes: dict[int, list[Looked | None]] = {executor.stage: [] for executor in self.executors}
        for step, known in zip([*work.steps, whole], units, strict=True):
            for executor in self.executors:
                passes[executor.stage].append(self._go(executor, step, known))
        return passes

    def _go(self, executor: StageExecutor, step: Step, known: dict[str, Any]) -> Looked | None:
        """One pass of one stage; None where memory did not suffice."""
        handed = self.rounds.take(executor, known, grad=False)
        if handed.is_void:
            self.rounds.hand_void(executor)
            return None
        try:
            run, looked = self._look(executor, step, handed)
        except torch.OutOfMemoryError as error:
            self._failure = str(error)
            self.rounds.hand_void(executor)
            return None
        except Exception as error:
            if self._exactly:
                self._failure = f"{type(error).__name__}: {error}"
                self.rounds.hand_void(executor)
                return None
            raise ValueError(
                "The micro-batches could not be compared with the whole batch: without gradients, in evaluation mode,"
                f" the step fails on one of them ({type(error).__name__}: {error}). Make sure that every row is treated"
                " by itself and that the loss is a mean over rows; check_loss=False then skips this comparison, and"
                " num_microbatches=1 needs none."
            ) from error
        self.rounds.hand(executor, run, handed)
        return looked

    def _look(self, executor: StageExecutor, step: Step, handed: Handed, number: int = 0) -> tuple[StageRun, Looked]:
        inputs = {place: value.clone() for place, value in handed.inputs.items()}  # the step may write into them
        run = self.rounds.begin(executor, replace(handed, inputs=inputs), self.cut.streams.begin(0, number))
        with (
            in_float64() if self._exactly else nullcontext(),
            FixedRandom(),
            torch.compiler.set_stance("force_eager"),  # nobody compiles for other shapes and modes
        ):
            result = as_far_as_it_goes(run, step)
        outputs = {place: x.detach() for place, x in (run.outputs or {}).items() if isinstance(x, Tensor)}
        return run, Looked(handed, outputs, self.judge.look(result) if run.is_last else None)

    def explained(self, run: ActiveRun, step: Step, number: int, fields: Fields) -> str:
        """What is said of a field of the batch without which a micro-batch's run of a stage would not fail; "".

        Args:
            run: the run that has failed.
            step: its step.
            number: of the micro-batch.
            fields: the batch's.
        """
        if self.cut.windows is not None:
            return ""  # copies would not meet
        inputs = {place: value.detach().clone() for place, value in run.inputs.items()}
        handed, executor = Handed({}, run.known, inputs=inputs), next(s for s in self.executors if s.stage == run.stage)
        with torch.no_grad(), untouched(self.cut.model), self.rounds.without_graphs():
            self.cut.model.eval()
            if self._runs(executor, step, handed):
                return ""  # it fails at times
            for name, change in fields.trials():
                if change != "empty" and self._runs(executor, fields.change(name, change)[0][number], handed):
                    return fields.words(name, change)
        return ""

    def _runs(self, executor: StageExecutor, step: Step, handed: Handed) -> bool:
        try:
            self._look(executor, step, handed)
        except Exception:
            return False
        return True

    # -- what differs --------------------------------------------------------------------------------------------------

    def _finding(
        self,
        executor: StageExecutor,
        work: StepWork,
        passes: Sequence[Looked | None],
        sizes: Sequence[int],
        fields: Fields,
    ) -> str:
        """What is wrong with a stage's values, or ""."""
        looked = [of for of in passes if of is not None]
        if len(looked) < len(passes):
            return ""
        said = self._differs(executor, work, looked, sizes)
        doubted = executor.departure is None and not said and self._doubts(looked)
        if not said and not doubted:
            return ""
        again = self._look(executor, work.steps[0], looked[0].handed, number=1)[1]
        if said and self._is_random(executor, work, looked[0], again):
            return (
                "The micro-batches could not be compared with the whole batch: the step draws random numbers by other"
                " means than torch's functions, and other ones for the whole batch. Draw them with torch, or make sure"
                " that every row is treated by itself; check_loss=False then skips this comparison."
            )
        for name, change in fields.trials(at_loss=executor.departure is None):
            with suppress(Exception):  # what cannot run shows nothing
                if self._is_equal_with(
                    executor, work, looked, sizes, *fields.change(name, change), only=change != "empty"
                ):
                    return f"{self._what(executor, looked, sizes)} {fields.words(name, change)}"
        if doubted:
            self._unsaid = partial(self.judge.warn, [of.result for of in looked[:-1]], looked[-1].result, again.result)
        return said

    def _doubts(self, looked: Sequence[Looked]) -> bool:
        return self.judge.doubts([of.result for of in looked[:-1]], looked[-1].result)

    def _is_equal_with(
        self, executor: StageExecutor, work: StepWork, looked: Sequence[Looked], sizes: Sequence[int],
        steps: Sequence[Step],
        whole: Step, only: bool,
    ) -> bool:  # fmt: skip
        """Whether nothing differs with other micro-batches (and, unless they are `only` changed, another batch)."""
        again = [self._look(executor, s, of.handed)[1] for s, of in zip(steps, looked[:-1], strict=True)]
        again.append(looked[-1] if only else self._look(executor, whole, looked[-1].handed)[1])
        if self._differs(executor, work, again, sizes, strictly=True):
            return False
        return executor.departure is not None or not self._doubts(again)

    def _is_random(self, executor: StageExecutor, work: StepWork, first: Looked, again: Looked) -> bool:
        """Whether the first micro-batch gives something else with other random numbers."""
        if executor.departure is None:
            return bool(self.judge.differs([first.result], again.result))
        places = self._places(executor, work, first)
        return any(not torch.equal(first.outputs[place], again.outputs[place]) for place in places)

    def _places(self, executor: StageExecutor, work: StepWork, looked: Looked) -> list[Place]:
        """What travels from a stage."""
        signature, places = work.signatures[0], list[Place]()
        for departure in executor.targets(signature):
            contract = departure.agreed(signature)
            if contract is None:  # every transfer is agreed on anew
                places += [place for place in looked.outputs if isinstance(place, int)]
            else:
                departure.await_answer(contract)
                places += contract.needed or ()
        return [place for place in dict.fromkeys(places) if place in looked.outputs]

    def _differs(
        self,
        executor: StageExecutor,
        work: StepWork,
        looked: Sequence[Looked],
        sizes: Sequence[int],
        strictly: bool = False,
    ) -> str:
        *parts, whole = looked
        if executor.departure is None:
            return self.judge.differs([of.result for of in parts], whole.result, exactly=self._exactly)
        near, everywhere = self.rounding.of_values, False
        if self._exactly:
            near, everywhere = self.rounding.of_entries, True
        for values, other in self._handed_on(executor, work, looked):
            equal = is_joined(values, other, sizes, near, everywhere)
            if equal is False or (strictly and equal is None):
                which = rows_apart(values, other, sizes, near) if everywhere else ""
                return (
                    f"{self._what(executor, looked, sizes)} {which}Rows of a batch do not stay apart there. Use"
                    " num_microbatches=1, or modules that treat every row by itself; check_loss=False skips this"
                    " comparison."
                )
        return ""

    def _suspects(
        self, executor: StageExecutor, work: StepWork, passes: Sequence[Looked | None], sizes: Sequence[int]
    ) -> str:  # fmt: skip
        """What differs more than rounding explains, and not enough to be a fault; ""."""
        looked = [of for of in passes if of is not None]
        if self._exactly or len(looked) < len(passes):
            return ""
        *parts, whole = looked
        if executor.departure is None:
            return self.judge.differs([of.result for of in parts], whole.result, exactly=True)
        for values, other in self._handed_on(executor, work, looked):
            near = self.rounding.of_entries
            if is_joined(values, other, sizes, near, everywhere=True) is False:
                return f"{self._what(executor, looked, sizes)} {rows_apart(values, other, sizes, near)}"
        return ""

    def _handed_on(
        self, executor: StageExecutor, work: StepWork, looked: Sequence[Looked]
    ) -> Iterator[tuple[list[Tensor], Tensor]]:  # fmt: skip
        """What a stage hands on for the micro-batches, and for the whole batch, value by value."""
        *parts, whole = looked
        for place in self._places(executor, work, whole):
            values = [of.outputs[place] for of in parts if place in of.outputs]
            if len(values) == len(parts):
                yield values, whole.outputs[place]

    def _what(self, executor: StageExecutor, looked: Sequence[Looked], sizes: Sequence[int]) -> str:
        """What differs on a stage, to begin a message with."""
        rows = f"the whole batch of {sum(sizes)} rows than for its {len(sizes)} micro-batches of {list(sizes)} rows."
        if executor.departure is None:
            return f"The last stage gives another loss, or logs or returns others, for {rows}"
        bounds = self.cut.layout.bounds
        first, last = (self.cut.block_name(bounds[executor.stage]), self.cut.block_name(bounds[executor.stage + 1] - 1))
        of = f"`{first}`" if first == last else f"`{first}` to `{last}`"
        return f"Stage {executor.stage} ({of}) hands on other values for {rows}"


@dataclass(frozen=True)
class Rounding:
    """Relative rounding of values that a model computes.

    Args:
        device: where it computes.
        halves: whether it computes in 16 bits anywhere.
    """

    device: torch.device
    halves: bool

    @classmethod
    def of(cls, model: torch.nn.Module, device: torch.device, autocast: bool) -> Rounding:
        """By the coarsest dtype of a model's parameters, and whether others are cast to 16 bits."""
        return cls(
            device, autocast or not {torch.bfloat16, torch.float16}.isdisjoint(p.dtype for p in model.parameters())
        )

    @property
    def of_losses(self) -> float:
        """Of one number, the mean of many."""
        return 2e-2 if self.halves else 2e-5 if self.device.type == "cpu" else 1e-3

    @property
    def of_exact_losses(self) -> float:
        """Of one number, where nothing jumps; beyond it a difference is looked at in float64."""
        return 5e-3 if self.halves else 1e-6 if self.device.type == "cpu" else 1e-4

    @property
    def of_values(self) -> float:
        """Of a tensor, on the average."""
        return 3e-2 if self.halves else 1e-4 if self.device.type == "cpu" else 2e-3

    @property
    def of_entries(self) -> float:
        """Of every entry of a tensor, where nothing jumps; beyond it a difference is looked at in float64."""
        return 1e-1 if self.halves else 1e-4 if self.device.type == "cpu" else 1e-2


def as_far_as_it_goes(run: StageRun, step: Step) -> Any:
    """Run a step as a stage; what stops it behind all that the next stage waits for is none of its results."""
    try:
        return run.forward(step)
    except PhantomError:
        if run.is_last or not run.exits:
            raise
        return None


def is_joined(
    parts: Sequence[Tensor], whole: Tensor, sizes: Sequence[int], near: float, everywhere: bool = False
) -> bool | None:
    """Whether a value of the whole batch is that of its micro-batches, joined along the dimension of rows; None if none
    has as many entries. With k entries a row these may lie row by row, or all rows' first before all second ones. Rows
    may lie in another order, as where a step flips its batch: what is made of them is compared at the loss.

    Args:
        parts: of the micro-batches.
        whole: of the whole batch.
        sizes: rows of each micro-batch.
        near: relative rounding.
        everywhere: of every entry, not of their mean.

    Example:
        >>> parts = [torch.tensor([0.0, 10.0]), torch.tensor([1.0, 11.0])]  # two views of a row each
        >>> is_joined(parts, torch.tensor([0.0, 1.0, 10.0, 11.0]), [1, 1], 1e-6)
        True
        >>> is_joined(parts, torch.tensor([0.0, 1.0, 11.0, 10.5]), [1, 1], 1e-6)
        False
    """
    candidates = [dim for dim in range(whole.dim()) if _has_rows(parts, whole, sizes, dim)]
    if not candidates:
        return None
    equal = entries_near if everywhere else values_near
    return any(equal(joined, whole, near) for dim in candidates for joined in arrangements(parts, sizes, dim)) or any(
        equal(_sorted(torch.cat(list(parts), dim), dim), _sorted(whole, dim), near) for dim in candidates
    )


def rows_apart(parts: Sequence[Tensor], whole: Tensor, sizes: Sequence[int], near: float) -> str:
    """Which rows of the whole batch are others than the micro-batches', in words.

    Example:
        >>> rows_apart([torch.zeros(2), torch.ones(2)], torch.tensor([0.0, 0.0, 1.0, 3.0]), [2, 2], 1e-4)
        '1 of 4 rows are others, the first is row 3. '
    """
    dim = next((dim for dim in range(whole.dim()) if _has_rows(parts, whole, sizes, dim)), None)
    if dim is None or whole.size(dim) != sum(sizes):
        return ""
    apart = _apart(torch.cat(list(parts), dim), whole, near).movedim(dim, 0).reshape(whole.size(dim), -1).any(1)
    rows = apart.nonzero().flatten().tolist()
    return f"{len(rows)} of {sum(sizes)} rows are others, the first is row {rows[0]}. " if rows else ""


def arrangements(parts: Sequence[Tensor], sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """The values of micro-batches joined, k x rows as [rows, k] and as [k, rows]."""
    by_row = torch.cat(list(parts), dim)
    count = parts[0].size(dim) // sizes[0]
    if count == 1:
        return [by_row]
    views = [part.unflatten(dim, (count, size)) for part, size in zip(parts, sizes, strict=True)]
    return [by_row, torch.cat(views, dim + 1).flatten(dim, dim + 1)]


def _sorted(value: Tensor, dim: int) -> Tensor:
    """The entries along a dimension in an order that follows from what they are."""
    real = torch.view_as_real(value) if value.is_complex() else value
    rows = real.movedim(dim, 0)
    flat = rows.reshape(len(rows), -1).double().nan_to_num()
    keys = flat @ torch.arange(1, flat.size(1) + 1, dtype=flat.dtype, device=flat.device).cos()
    return value.index_select(dim, keys.argsort())


def _has_rows(parts: Sequence[Tensor], whole: Tensor, sizes: Sequence[int], dim: int) -> bool:
    count, rest = divmod(whole.size(dim), sum(sizes))
    shape = list(whole.shape)
    return bool(count and not rest) and all(
        list(part.shape) == [*shape[:dim], count * size, *shape[dim + 1 :]] and part.dtype == whole.dtype
        for part, size in zip(parts, sizes, strict=True)
    )


def values_near(found: Tensor, wanted: Tensor, near: float) -> bool:
    """Whether values are equal but for rounding, on the average: routers and the like may jump at single places."""
    if not wanted.numel():
        return True
    if not wanted.is_floating_point() and not wanted.is_complex():
        return bool((found != wanted).float().mean() <= 1e-2)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    difference = torch.where(same, 0.0, (found - wanted).abs().double()).nan_to_num(torch.inf, torch.inf)
    size = wanted.abs().double()
    return bool(difference.mean() <= near * size[size.isfinite()].mean().nan_to_num(0.0).clamp_min(1e-6))


def entries_near(found: Tensor, wanted: Tensor, near: float) -> bool:
    """Whether every entry is equal but for rounding: one that jumps is none."""
    return not bool(_apart(found, wanted, near).any())


def _apart(found: Tensor, wanted: Tensor, near: float) -> Tensor:
    """Which entries are not equal but for rounding, relative to themselves and the size of all."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if not wanted.is_floating_point() and not wanted.is_complex():
        return ~same
    difference = torch.where(same, 0.0, (found - wanted).abs().double()).nan_to_num(torch.inf, torch.inf)
    size = wanted.abs().double()
    usual = size[size.isfinite()].mean().nan_to_num(0.0).clamp_min(1e-6)
    return difference > near * (usual + size.nan_to_num(0.0, 0.0))


def _warn_of_suspects(seen: str, failure: str, other: Callable[[], None] | None) -> None:
    """Warn that what differs could not be told from rounding, and of what else there is."""
    if other is not None:
        other()
    warnings.warn(
        f"{seen} A router may jump at a token for rounding, and a row may read another; in float64, where only the"
        f" second differs, the step does not run ({failure[:200]}). Make sure that every row is treated by itself, or"
        " use num_microbatches=1; check_loss=False skips this comparison.",
        stacklevel=2,
    )
