"""One step of the Trainer, cut into micro-batches: what the engine runs, and what comes of it for the Trainer.

The one idea: everything that a `*_step` call means to Lightning (its batch, its precision context, what it logs, what
it returns) is gathered in one object for the length of the step, so that the engine needs to know nothing of Lightning
and the strategy nothing of micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.pipeline.batch.fields import Cutting, FieldMemory, Name, named_leaves
from lightning_parallel.pipeline.batch.rows import map_named
from lightning_parallel.pipeline.gradients.early_sums import Round
from lightning_parallel.pipeline.parity.loss_check import LossCheck, StepReport
from lightning_parallel.pipeline.parity.stage_check import Change, Fields, Rounding, StageCheck
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.pipeline.runtime.turns import Swap, swap_of
from lightning_parallel.pipeline.runtime.work import Joined, Marks, StepWork
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.stage.side_effects import Attributes
from lightning_parallel.trainer.metrics.step_metrics import StepMetrics
from lightning_parallel.trainer.step.batch_numbers import batch_index, batch_number
from lightning_parallel.trainer.step.carried_state import CarriedState
from lightning_parallel.trainer.step.log_check import CheckedLog
from lightning_parallel.trainer.step.log_spreader import LogSpreader, StepIsVoid
from lightning_parallel.trainer.step.loss_scale import LossScale
from lightning_parallel.trainer.step.microbatch_losses import loss_of, number_on, weigh
from lightning_parallel.trainer.step.repeated_calls import RepeatedCalls
from lightning_parallel.trainer.step.step_log import LogCall, StepLog
from lightning_parallel.trainer.step.two_directions import Directions, RankResults, ended_on, filling_seen
from lightning_parallel.zero.gather.parameter_gather import ParameterGather

_CONTEXTS = {"training": "train", "validation": "val", "test": "test", "predict": "predict"}


class RunsSteps(Protocol):
    """What a step reads of the strategy that runs it; `PipelineStrategy` says what each is."""

    loss_weight: Callable[[Any], float | Tensor] | None
    check_loss: bool
    compared: set[str]
    directions: Directions
    repeats: RepeatedCalls
    spreader: LogSpreader
    windows: ParameterGather | None

    @property
    def lightning_module(self) -> LightningModule | None: ...

    @property
    def precision_plugin(self) -> Precision: ...

    @property
    def root_device(self) -> torch.device: ...

    @property
    def pipeline(self) -> Pipeline: ...

    @property
    def at_loss(self) -> bool: ...

    @property
    def metrics(self) -> StepMetrics: ...

    @property
    def loss_scale(self) -> LossScale: ...

    def memory_of(self, kind: str, args: tuple[Any, ...]) -> FieldMemory: ...

    def schedule_of(self, signatures: Sequence[Hashable], training: bool) -> Schedule: ...

    def sums_while_running(
        self, schedule: Schedule, may_begin_anew: bool
    ) -> tuple[Round | None, Callable[[int], None] | None]: ...

    def joined(
        self, schedule: Schedule, world: Sequence[Swap], attributes: Callable[[], Attributes] | None
    ) -> Joined | None: ...

    def wants_comparison(self, step: TrainerStep) -> bool: ...

    def marks(self, schedule: Schedule, training: bool) -> Marks: ...


class TrainerStep:
    """A `training_step`, `validation_step`, `test_step` or `predict_step` of all micro-batches of a batch.

    Args:
        strategy: the strategy that runs it.
        kind: "training", "validation", "test" or "predict".
        batch: the whole batch, on this rank's device.
        args: what Lightning passes to the step after the batch.
        sizes: rows of each micro-batch.
    """

    def __init__(self, strategy: RunsSteps, kind: str, batch: Any, args: tuple[Any, ...], sizes: list[int]) -> None:
        assert strategy.lightning_module is not None
        self.strategy, self.kind, self.batch, self.args, self.sizes = strategy, kind, batch, args, sizes
        self.training, self.module = kind == "training", strategy.lightning_module
        self.at_loss, self.ends = strategy.at_loss, strategy.pipeline.ends_steps
        self.index = batch_index(self.module, self.training)
        self.memory = strategy.memory_of(kind, args)
        self.cutting = self.memory.cutting(batch, sum(sizes)) if len(sizes) > 1 else Cutting()
        self.parts = microbatch.split(batch, sizes, self.memory.fields, self.cutting)
        self.weights = weigh(self.parts, sizes, strategy.loss_weight)
        self.signatures = strategy.pipeline.signatures(kind, self.parts)
        self.schedule = strategy.schedule_of(self.signatures, self.training)
        self.metrics = strategy.metrics
        self.log = StepLog(self.module, self.ends, self.metrics, self.training)
        self.output: Any = None
        self.loss: Tensor | None = None
        self.calls: list[LogCall] = []
        self._work: StepWork | None = None
        self._carried: CarriedState | None = None
        self._explaining = False

    def work(self) -> StepWork:
        """What the engine is asked to do."""
        strategy, scale = self.strategy, 1.0 / self.module.trainer.accumulate_grad_batches
        may_begin_anew = strategy.repeats.is_first(self.kind)
        early, after_action = (
            strategy.sums_while_running(self.schedule, strategy.repeats.is_settled(self.kind))
            if self.training
            else (None, None)
        )
        self._work = StepWork(
            schedule=self.schedule,
            steps=[self._step_on(part, i) for i, part in enumerate(self.parts)],
            signatures=self.signatures,
            batch=batch_number(self.module, self.kind, self.args, self.index),
            loss_of=loss_of if self.training else None,
            scales=[self._seed(weight * scale) for weight in self.weights] if self.training else (),
            after_forwards=self._after_forwards(),
            after_action=after_action,
            early=early,
            windows=strategy.windows,
            may_begin_anew=may_begin_anew,
            joined=strategy.joined(self.schedule, self._world(), self._attributes()),
        )
        return self._work

    def _world(self) -> list[Swap]:
        """What there is once and is a micro-batch's own while its step runs."""
        world = [swap_of(self.log, "microbatch"), swap_of(self.metrics, "share")]
        if self.metrics.replay is not None:
            world.append(swap_of(self.metrics.replay, "microbatch"))
        return world if self._carried is None else [*world, swap_of(self._carried, "read")]

    def _attributes(self) -> Callable[[], Attributes] | None:
        """What finds tensors in the module's attributes, in the first step."""
        return None if self._carried is None else self._carried.attributes

    def _after_forwards(self) -> Callable[[list[Any]], None] | None:
        """What follows this rank's last forward of the last stage."""
        if not self.ends:
            return None
        if self.strategy.pipeline.both_ways:
            return self._meet
        return self._announce if self.kind != "predict" else None

    def run(self) -> Any:
        """Run the step on all micro-batches; returns what the Trainer gets for the batch on this rank."""
        pipeline, engine = self.strategy.pipeline, self.strategy.pipeline.engine
        check = self.strategy.wants_comparison(self)
        self._carried = CarriedState(self.module) if check and self.training else None
        work = self.work()
        with self.metrics.step():
            with StepLog(self.module, self.ends, self.metrics, self.training, silent=True).recording():
                self.strategy.repeats.learn(self.kind, work)
            with self.log.recording(), pipeline.streams.step(), self._filling_seen():
                results = engine.run(work, self.strategy.marks(work.schedule, self.training))
            if self._carried is not None:
                self._carried.end()
                self._carried = None
            if pipeline.both_ways:
                self._join_directions(results)
            check = check and not (work.may_begin_anew and any(pipeline.all_gather(work.is_void)))
            if work.may_begin_anew:
                self._refuse_void(work)
            if check:
                self._compare(work)
                self.strategy.compared.add(self.kind)
        if self.kind == "predict":
            return microbatch.join(results, self.sizes, self.weights) if self.at_loss else None
        return self._finish(self.strategy.spreader)

    def _refuse_void(self, work: StepWork) -> None:
        """Where a step may have been in vain: was it?

        Raises:
            StepIsVoid: it was.
        """
        if self.at_loss and work.is_void:
            self.strategy.spreader.announce_void()
            raise StepIsVoid
        if self.kind == "predict" and self.at_loss:
            self.strategy.spreader.announce(None, [])
            self.strategy.spreader.send(None, [])
        elif self.kind == "predict":
            self.strategy.spreader.receive()

    def _finish(self, spreader: LogSpreader) -> Any:
        """Bring loss and log calls to every rank; the step's own result exists on the loss stage."""
        if self.at_loss:
            spreader.send(self.loss, self.calls)
        else:
            self.loss, self.calls = spreader.receive()
        with self._precision():  # Lightning keeps what is logged in the default dtype of where it is logged
            self.log.replay(self.calls)
        if not self.training:
            return self.output
        return {**self.output, "loss": self.loss} if isinstance(self.output, Mapping) else self.loss

    def _filling_seen(self) -> AbstractContextManager[None]:
        first = self.index == 0 and self.ends and self.strategy.pipeline.both_ways
        return filling_seen(self.module, f"{self.kind}_step") if first else nullcontext()

    def _meet(self, results: list[Any]) -> None:
        """The forwards of this rank's replica are done: where others wait for what they gave, it is sent."""
        directions = self.strategy.directions
        if self.at_loss:
            directions.forwards_done()
            return
        if self._is_void:
            directions.pack(RankResults({}, is_void=True))
            return
        own = {number: results[number] for number in ended_on(self.schedule, self.strategy.pipeline.row)}
        assert self.metrics.replay is not None
        directions.pack(RankResults(own, self.log.notes, self.metrics.replay.updates))

    def _join_directions(self, results: list[Any]) -> None:
        """After all actions: the rank of the loss takes what other ranks' micro-batches gave, and announces it."""
        directions = self.strategy.directions
        if not self.at_loss:
            directions.hand_over()
            return
        shares = directions.receive(self.schedule)
        if self._work is not None and any(share.is_void for share in shares):
            self._work.is_void = True
        if self._is_void:
            return
        with directions.joining():
            for share in shares:
                for number, result in share.results.items():
                    results[number] = result
            with self._precision():  # as the steps ran
                self.log.take([note for share in shares for note in share.notes])
                self.metrics.take([update for share in shares for update in share.updates])
            if self.kind != "predict":
                self._announce(results)

    @property
    def _is_void(self) -> bool:
        return self._work is not None and self._work.is_void

    def _announce(self, results: list[Any]) -> None:
        """The forwards are done: what is returned and logged is known."""
        if self._is_void:
            return
        self.output = microbatch.join(results, self.sizes, self.weights)
        self.loss = loss_of(self.output) if self.training else None
        self.calls = self.log.joined(self.weights)
        self.strategy.spreader.announce(self.loss, self.calls)

    def _step_on(self, part: Any, number: int) -> Callable[[], Any]:
        method = getattr(self.module, f"{self.kind}_step")

        def step() -> Any:
            self.log.microbatch = number
            if self.metrics.replay is not None:
                self.metrics.replay.microbatch = number
            self.metrics.share = self.weights[number] if len(self.sizes) > 1 else None
            run = self.strategy.pipeline.cut.active
            cut_short = self.ends and run is not None and not run.is_last
            carried = self._carried.watching(self.sizes[number]) if self._carried is not None else nullcontext()
            with self._precision(), self.metrics.untouched() if cut_short else nullcontext(), carried:
                try:
                    return method(part, *self.args)
                except (RuntimeError, ValueError, IndexError) as error:
                    if len(self.sizes) > 1 and not isinstance(error, PhantomError):
                        self._explain(error, number)
                    raise

        return step

    def _explain(self, error: Exception, number: int) -> None:
        """Raise what is wrong with the way in which the batch was cut, if an error comes from that.

        Raises:
            ValueError: a norm sees one row, or a field of the batch was cut that is none of rows.
        """
        rows, run = self.sizes[number], self.strategy.pipeline.cut.active
        if "Expected more than 1 value per channel when training" in str(error):
            most = max(1, sum(self.sizes) // 2)
            raise ValueError(
                f"{error}: micro-batch {number} has {rows} of the batch's {sum(self.sizes)} rows, and a batch norm"
                f" needs 2. Use num_microbatches={most} or fewer (a batch of 2 rows for each), num_microbatches=1 or"
                ' batch_norm="batch" for statistics of the whole batch, or norms of single rows (GroupNorm, LayerNorm).'
            ) from error
        if run is None or self._explaining or self.kind in self.strategy.compared or not self.strategy.check_loss:
            return
        self._explaining = True
        try:
            check, fields = self._stage_check(CheckedLog(self.module, run.cut)), self._fields()
            with self.metrics.untouched(), self.strategy.pipeline.streams.step():
                said = check.explained(run, self._step_on(self.parts[number], number), number, fields)
        finally:
            self._explaining = False
        if said:
            raise ValueError(f"{type(error).__name__} in micro-batch {number}: {error}. {said}") from error

    def _seed(self, share: float | Tensor) -> Tensor:
        """What the backward of a micro-batch begins with."""
        return self.strategy.loss_scale.scaled(self._scalar(share))

    def _scalar(self, value: float | Tensor) -> Tensor:
        """A number on the device, in the module's precision but no lower than float32."""
        if isinstance(value, Tensor):
            return value
        dtype = cast(torch.dtype, self.module.dtype)
        return number_on(value, self.strategy.root_device, torch.promote_types(torch.float32, dtype))

    def _precision(self) -> AbstractContextManager[None]:
        """The precision plugin's context for a step of this kind."""
        return getattr(self.strategy.precision_plugin, f"{_CONTEXTS[self.kind]}_step_context")()

    def _compare(self, work: StepWork) -> None:
        """Compare all stages on the micro-batches with all stages on the whole batch."""
        pipeline, log = self.strategy.pipeline, CheckedLog(self.module, self.strategy.pipeline.cut)
        check = self._stage_check(log)
        with log.recording(), self.metrics.untouched(), pipeline.streams.step():
            compared = check.compare(work, self._step_on(self.batch, 0), self.sizes, self._fields())
        if not compared and self.at_loss:
            warnings.warn(
                "Could not compare the micro-batches with the whole batch (the device's memory does not suffice)."
                " Micro-batches are weighted by rows: make sure that the loss is a mean over rows and that every row is"
                " treated by itself, or let a smaller batch come first.",
                stacklevel=2,
            )

    def _stage_check(self, log: CheckedLog) -> StageCheck:
        pipeline, device = self.strategy.pipeline, self.strategy.root_device
        with self._precision():
            rounding = Rounding.of(self.module, device, torch.is_autocast_enabled(device.type))

        def look(result: Any) -> StepReport:
            loss = loss_of(result).detach().double() if self.training else None
            return StepReport(loss, log.taken(), result if self.kind == "predict" else None)

        judge = LossCheck(rounding, self.sizes, self.weights, look)
        executors = [executor for (replica, _), executor in pipeline.engine.executors.items() if not replica]
        return StageCheck(pipeline.rounds, executors, pipeline.all_gather, judge, rounding)

    def _fields(self) -> Fields:
        fields = self.memory.fields
        declared = {
            name: leaf
            for name, leaf in named_leaves(self.batch)
            if fields.kind(name) == "whole" and isinstance(leaf, (Tensor, list, tuple))
            and not (isinstance(leaf, Tensor) and not leaf.dim())
        }  # fmt: skip
        return Fields(self.cutting, sum(self.sizes), self._changed, declared)

    def _changed(self, name: Name, change: Change) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
        """The step on the micro-batches and on the whole batch where one field is another."""
        rows, batch, entries = sum(self.sizes), self.batch, dict(self.cutting.entries)
        if change == "empty":
            batch = map_named(lambda leaf, of: torch.zeros_like(leaf) if of == name else leaf, batch)
        elif change == "whole":
            del entries[name]
        else:
            entries[name] = len(dict(named_leaves(batch))[name]) // rows
        parts = microbatch.split(batch, self.sizes, self.memory.fields, Cutting(entries))
        return [self._step_on(part, 0) for part in parts], self._step_on(batch, 0)
