"""What a step logs: recorded for each micro-batch on the loss stage, joined, and replayed on every rank.

The one idea: while micro-batches run, `self.log` only takes notes. After the last one, the notes become one call a key
(the mean over micro-batches with the step's own weights), the loss stage tells the other ranks (``log_spreader.py``),
and every rank makes the same `LightningModule.log` calls. So loggers, progress bar, checkpoints and early stopping see
one value everywhere, and what a key means (on_step, on_epoch, sync_dist, ...) stays Lightning's business.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_parallel.pipeline.batch.microbatch import weighted_sum
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.trainer.metrics.logged_metrics import LoggedValue
from lightning_parallel.trainer.metrics.step_metrics import StepMetrics

_SIGNATURE = inspect.signature(LightningModule.log)


@dataclass
class LogCall:
    """One joined `self.log` call: its name, its value (None until it arrives), its options; `dtype` None: a number.

    Of a torchmetrics object: `metric`, its attribute in the module, and the value of the batch where it is logged
    (`dtype` None: there is none).
    """

    name: str
    value: Any
    options: dict[str, Any]
    dtype: torch.dtype | None
    metric: str | None = None


@dataclass(frozen=True)
class MetricNote:
    """A metric that a micro-batch logged: its attribute, and (where `on_step` and not yet added up) what it took."""

    name: str
    given: LoggedValue | None = None


@dataclass(frozen=True)
class LogNote:
    """One `self.log` call of one micro-batch; `key`: its name and how many calls of that name came before it."""

    microbatch: int
    key: tuple[str, int]
    value: Any
    options: dict[str, Any]


def dtype_of(value: Any) -> torch.dtype | None:
    """Of a tensor; None for a number."""
    return value.dtype if isinstance(value, Tensor) else None


class StepLog:
    """Notes of the `self.log` calls of one step, by micro-batch; `training`: whether `on_step` is the default.

    `loss_stage`: whether steps run to their end on this rank. `silent`: values are looked at, and not noted.
    """

    def __init__(
        self, module: LightningModule, loss_stage: bool, metrics: StepMetrics, training: bool, silent: bool = False
    ) -> None:
        self.module, self.loss_stage, self.metrics, self.training = module, loss_stage, metrics, training
        self.silent = silent
        self.notes: list[LogNote] = []
        self._seen: dict[tuple[int, str], int] = {}
        self.microbatch = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """`self.log` takes notes on the loss stage; elsewhere what a cut step logs is not its to log."""
        self.module.__dict__["log"] = self._note
        try:
            yield
        finally:
            del self.module.__dict__["log"]

    def joined(self, weights: Sequence[float | Tensor]) -> list[LogCall]:
        """One call for each logged key, in the order of first appearance."""
        by_key: dict[tuple[str, int], list[LogNote]] = {}
        for note in self.notes:
            by_key.setdefault(note.key, []).append(note)
        return [self._join(key, notes, weights) for key, notes in by_key.items()]

    def take(self, notes: Sequence[LogNote]) -> None:
        """Add what other ranks noted, in the order of micro-batches."""
        self.notes = sorted([*self.notes, *notes], key=lambda note: note.microbatch)
        for note in self.notes:
            if isinstance(note.value, MetricNote) and note.value.given is not None:
                self.metrics.logged.add(note.key, note.value.name, note.value.given)

    def replay(self, calls: Sequence[LogCall]) -> None:
        """Make the joined calls."""
        for call in calls:
            value = call.value if call.metric is None else self.metrics.logged.restore(call.metric, call.value)
            self.module.log(call.name, value, **call.options)

    def _note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        run = self.metrics.pipeline.cut.active
        if not self.loss_stage or (run is not None and not run.is_last):
            return
        options = options_of(self.module, name, value, args, options)
        value = value if run is None else run.realized(value)
        if isinstance(value, Phantom):
            raise PhantomError(
                f"self.log({name!r}) logs a value computed from {value.origin}, which the loss stage does not hold. Log"
                " values that are computed from the last block's output, or set skip_connections=True."
            )
        refuse_value(name, value)
        if self.silent:
            return
        occurrence = self._seen.get((self.microbatch, name), 0)
        self._seen[self.microbatch, name] = occurrence + 1
        if isinstance(value, (Metric, MetricCollection)):
            value = self._note_metric((name, occurrence), value, options)
        value = value.detach() if isinstance(value, Tensor) else value
        self.notes.append(LogNote(self.microbatch, (name, occurrence), value, options))

    def _note_metric(self, key: tuple[str, int], metric: Any, options: dict[str, Any]) -> MetricNote:
        name, on_step = self.metrics.logged.name_of(metric, key[0]), options.get("on_step")
        if not (self.training if on_step is None else on_step):
            return MetricNote(name)
        given = self.metrics.logged.given(metric, self.metrics.share is None)
        if self.metrics.pipeline.both_ways:
            return MetricNote(name, given)
        self.metrics.logged.add(key, name, given)
        return MetricNote(name)

    def _join(self, key: tuple[str, int], notes: list[LogNote], weights: Sequence[float | Tensor]) -> LogCall:
        options = dict(notes[-1].options)
        if options.get("batch_size") is not None:
            options["batch_size"] = sum(note.options["batch_size"] for note in notes)
        values = [note.value for note in notes]
        if isinstance(values[-1], MetricNote):
            value = self.metrics.logged.value(key, values[-1].name)
            return LogCall(key[0], value, options, dtype_of(value), values[-1].name)
        if len(values) > 1:
            values = [reduced(values, [weights[note.microbatch] for note in notes], options.get("reduce_fx", "mean"))]
        return LogCall(key[0], values[0], options, dtype_of(values[0]))


def options_of(
    module: LightningModule, name: str, value: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The options of a `self.log` call by name, also those that were given by place."""
    if args:
        options = dict(_SIGNATURE.bind(module, name, value, *args, **options).arguments)
        del options["self"], options["name"], options["value"]
    return options


def refuse_value(name: str, value: Any) -> None:
    """Refuse what Lightning refuses, in its words, before values of micro-batches are joined.

    Raises:
        ValueError: it is no number, no tensor of one element and no metric.
    """
    if not isinstance(value, (numbers.Number, Tensor, Metric, MetricCollection)):
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )


def reduced(values: list[Any], weights: list[Any], reduce_fx: str | Callable[..., Any]) -> Any:
    """One value of those that micro-batches logged, by what the step asked for; means by weight."""
    kind = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if kind in ("max", "min"):
        worst = max if kind == "max" else min
        return worst(values) if isinstance(values[0], numbers.Number) else getattr(torch.stack(values), f"a{kind}")(0)
    if kind == "sum":
        return sum(values[1:], values[0])
    if isinstance(values[0], Tensor) and not values[0].is_floating_point():
        values = [value.to(torch.get_default_dtype()) for value in values]
    return weighted_sum(values, weights) / sum(weights)
