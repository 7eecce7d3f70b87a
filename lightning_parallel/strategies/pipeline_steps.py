"""A Trainer's steps on a pipeline: `training_step`, `backward`, and the evaluations'.

The one idea: whatever Lightning calls, a batch is cut into micro-batches and goes through the schedule once; what is
compared between ranks now and then is compared around it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.pipeline.batch.fields import BatchFields, FieldMemory, named_leaves
from lightning_parallel.pipeline.batch_norm.microbatch_norm import DeferredBatchNorm
from lightning_parallel.pipeline.batch_norm.whole_batch_norm import WholeBatchNorm
from lightning_parallel.pipeline.parameters.replica_check import buffers_unchanged
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.outside import shapes_only
from lightning_parallel.pipeline.runtime.stats import PipelineRecorder
from lightning_parallel.pipeline.runtime.turns import Swap
from lightning_parallel.pipeline.runtime.work import Joined, Marks
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.stage.side_effects import Attributes
from lightning_parallel.strategies.pipeline_arguments import LossWeight
from lightning_parallel.strategies.pipeline_gradients import PipelineGradients
from lightning_parallel.trainer.metrics.step_metrics import StepMetrics
from lightning_parallel.trainer.step.log_spreader import LogSpreader, StepIsVoid
from lightning_parallel.trainer.step.loss_scale import LossScale
from lightning_parallel.trainer.step.parameter_writes import fingerprint, refuse_written
from lightning_parallel.trainer.step.repeated_calls import RepeatedCalls
from lightning_parallel.trainer.step.trainer_step import TrainerStep
from lightning_parallel.trainer.step.two_directions import Directions
from lightning_parallel.zero.closed_parameters import part_of


class PipelineSteps(PipelineGradients):
    """The part of a pipeline strategy that runs steps; the arguments are `PipelineStrategy`'s."""

    loss_weight: LossWeight | None
    check_loss: bool
    directions: Directions
    repeats: RepeatedCalls
    spreader: LogSpreader
    stats: PipelineRecorder | None
    _batch_norm: DeferredBatchNorm | WholeBatchNorm
    batch_fields: BatchFields
    compared: set[str]  # kinds of steps of which one was compared with the whole batch
    _loss_checked: bool
    _memories: dict[tuple[str, int], FieldMemory]
    _loss_scale: LossScale | None
    _metrics: StepMetrics | None
    _weights_of_step: list[int] | None = None

    @property
    def metrics(self) -> StepMetrics:
        assert self._metrics is not None, "the metrics are watched after setup"
        return self._metrics

    @property
    def loss_scale(self) -> LossScale:
        assert self._loss_scale is not None, "there is one after setup"
        return self._loss_scale

    def training_step(self, batch: Any, *args: Any) -> Any:
        with self._gathered("training", batch, args):
            output = self.repeats.run("training", lambda: self._train(batch, args))
        self._weights_of_step = self._fingerprint()  # of what is there until the backward, also of parts
        return output

    def _gathered(self, kind: str, batch: Any, args: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Around a step: parameters that are divided between steps are whole inside, or while an action runs."""
        return nullcontext()

    def _train(self, batch: Any, args: tuple[Any, ...]) -> Any:
        sizes = self._sizes(batch)
        self._warn_of_sizes(batch, sizes)
        keep = not self._will_be_zeroed()
        with self.pipeline.gradients.aside(keep), self._batch_norm.step(len(sizes)), self._replicas_compared():
            output = self._run("training", batch, args, sizes)
        self._loss_checked = True
        return output

    def _warn_of_sizes(self, batch: Any, sizes: list[int]) -> None:
        """Once, before the first batch: what follows from how it is cut, and names of fields that it has not."""
        if self._loss_checked or self.global_rank != 0:
            return
        if self.num_microbatches is not None and len(sizes) < self.num_microbatches:
            rank_zero_info(
                f"{type(self).__name__}(num_microbatches={self.num_microbatches}) got a first batch of {sum(sizes)}"
                f" rows and runs it as {len(sizes)} micro-batches. Use larger batches for the schedule's full bubble."
            )
        if norms := self._batch_norm.says(sizes):
            warnings.warn(norms, stacklevel=2)
        if unknown := self.batch_fields.unknown(batch):
            names = sorted({".".join(name) for name, _ in named_leaves(batch)})
            warnings.warn(
                f"batch_fields names {unknown}, which the first training batch does not have; its fields are {names}.",
                stacklevel=2,
            )

    def _replicas_compared(self) -> AbstractContextManager[None]:
        """At batches 0, 1, 2, 4, 8, ...: are replicas still equal, and does a step leave buffers to its end?"""
        module, pipeline = self.lightning_module, self.pipeline
        assert module is not None
        index = module.trainer.fit_loop.epoch_loop.batch_idx
        if pipeline.num_replicas == 1 or index & (index - 1):
            return nullcontext()
        self._compare_replicas(f"before training batch {index} of epoch {module.trainer.current_epoch}")
        return buffers_unchanged(module)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradients that the schedule made; hooks run where Lightning runs them."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        why = "a step's backwards have run by then"
        refuse_written(self._weights_of_step, self._fingerprint(), type(self).__name__, why)
        self._deliver()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def _fingerprint(self) -> list[int] | None:
        assert self.lightning_module is not None
        return fingerprint(self.lightning_module, (part_of(parameter) for _, parameter in self.pipeline.own))

    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("validation", batch, args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("test", batch, args)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("predict", batch, args)

    def _evaluate(self, kind: str, batch: Any, args: tuple[Any, ...]) -> Any:
        with self._gathered(kind, batch, args):
            return self.repeats.run(kind, lambda: self._run_evaluation(kind, batch, args))

    def _run_evaluation(self, kind: str, batch: Any, args: tuple[Any, ...]) -> Any:
        sizes = self._sizes(batch)
        if isinstance(self._batch_norm, DeferredBatchNorm):
            return self._run(kind, batch, args, sizes)
        with self._batch_norm.step(len(sizes)):  # norms without running statistics
            return self._run(kind, batch, args, sizes)

    def _run(self, kind: str, batch: Any, args: tuple[Any, ...], sizes: list[int]) -> Any:
        step = TrainerStep(self, kind, batch, args, sizes)
        if step.index & (step.index - 1) == 0:  # 0, 1, 2, 4, 8, ...
            self.pipeline.check_same("batch", {f"{kind} batch {step.index}": batch})
        first = step.index == 0 and not self.repeats.is_again(kind)  # what copies do together they do once
        if first:
            self._pause()
        if first and kind != "training":
            self.pipeline.data.equalize(self.pipeline.own_buffers())  # running statistics are the first copy's
            self.pipeline.check_same("logged", self._logged())
        try:
            return step.run()
        except StepIsVoid:
            self._drop_what_was_measured(kind)
            raise

    def _drop_what_was_measured(self, kind: str) -> None:
        """A step is void, and will begin anew."""
        if kind == "training" and self.stats is not None:
            self.stats.cancel()
        if kind == "training" and self.pipeline.sums is not None:
            self.pipeline.sums.cancel()

    def _logged(self) -> dict[str, float]:
        assert self.lightning_module is not None
        return {name: float(value) for name, value in self.lightning_module.trainer.callback_metrics.items()}

    def _check_last_logged(self) -> None:
        """Compare what was logged where no step follows that would; rank 0 tells, and does not wait."""
        if self.num_ranks > 1 and self.at_loss:
            self.pipeline.tell(self._logged())
            self.pipeline.settle()
        elif self.num_ranks > 1:
            self.pipeline.check_heard("logged", self._logged(), self.metrics.hear())

    def on_train_end(self) -> None:
        self._check_last_logged()
        self._pause()
        if self.pipeline.num_replicas > 1:
            self._compare_replicas("at the end of training")
        super().on_train_end()

    def _compare_replicas(self, when: str) -> None:
        self.pipeline.compare_replicas(when)

    on_validation_end = on_test_end = _check_last_logged

    def _sizes(self, batch: Any) -> list[int]:
        """Rows of each micro-batch. A batch that is not cut needs no rows that can be counted."""
        count = self._default_microbatches()
        try:
            return microbatch.row_sizes(self.batch_fields.count_rows(batch), count)
        except ValueError:
            if count > 1 and self.num_stages > 1:
                raise
            return [1]

    def memory_of(self, kind: str, args: tuple[Any, ...]) -> FieldMemory:
        """What is known of the fields of batches of one kind (and of one loader of it)."""
        loader = next((arg for arg in args[1:2] if isinstance(arg, int)), 0)
        return self._memories.setdefault((kind, loader), FieldMemory(self.batch_fields))

    def wants_comparison(self, step: TrainerStep) -> bool:
        """Whether this step's stages are compared on micro-batches and on the whole batch: the first of its kind, and
        where fields of the batch go whole to every micro-batch that were others before.

        Raises:
            ValueError: it cannot be told what a field is.
        """
        if not self.check_loss or len(step.sizes) == 1:
            return False
        first = step.kind not in self.compared
        new = step.memory.look(step.batch, step.cutting, sum(step.sizes))
        return (first or new) and (self.windows is None or self.windows.is_held)

    def joined(
        self, schedule: Schedule, world: Sequence[Swap], attributes: Callable[[], Attributes] | None
    ) -> Joined | None:
        """The stages whose micro-batches run in turns; `world`: see `Joined`; `attributes`: see `WholeBatchNorm`.

        Raises:
            ValueError: the schedule cannot.
        """
        norms = self._batch_norm
        stages = norms.joined(schedule) if isinstance(norms, WholeBatchNorm) else None
        if not stages:
            return None
        assert isinstance(norms, WholeBatchNorm)
        norms.look_at(attributes)
        return Joined(stages, norms.together, world)

    def marks(self, schedule: Schedule, training: bool) -> Marks:
        """Where the engine leaves the marks of a step; those of training steps are kept for the callbacks."""
        assert self.stats is not None
        return self.stats.begin(schedule) if training else Marks(schedule)

    @contextmanager
    def _forward_context(self) -> Iterator[None]:
        """The precision's context; outside steps it is entered by the model's summary, which wants shapes alone."""
        outside = self._metrics is None or not self.metrics.in_step
        with type(self.precision_plugin).forward_context(self.precision_plugin):
            if not outside:
                yield
                return
            try:
                with shapes_only():
                    yield
            except PhantomError as error:
                raise PhantomError(
                    "The model's summary runs example_input_array through the model, of which a rank holds one stage,"
                    f" on shapes alone, and the model reads data on its way: {error} Leave example_input_array out, or"
                    " use Trainer(enable_model_summary=False)."
                ) from error
