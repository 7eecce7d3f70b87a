"""Log what a rank's memory holds, beside the activations that the schedule says it holds."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel.callbacks.logged import log_measured
from lightning_parallel.callbacks.stats import EveryNSteps, log_every_n_steps, runs_pipeline, stats_of
from lightning_parallel.measure.memory import MemoryMeter, RankMemory, allocator_of
from lightning_parallel.measure.memory_picture import draw_memory
from lightning_parallel.measure.memory_reading import ExpectedActivations, ExpectedStates, MemoryReading
from lightning_parallel.zero.expected_bytes import ModelStates


class MemoryMonitor(Callback):
    """Logs each rank's memory by category, in bytes, to every logger; with a pipeline or without.

    Keys, each the same number on every rank. Without a rank's number a key is of the rank that holds most:

    * ``parallel/memory_parameters``, ``_buffers``, ``_optimizer``, ``_gradients``, ``_activations``, ``_other``: held
      when the step ended; ``parallel/memory_current`` is their sum;
    * ``parallel/memory_gradients_peak``, ``_activations_peak``, ``_other_peak``: the most of each during the step;
    * ``parallel/memory_peak``: the most of all together at a time, and ``parallel/memory_peak/rank_r``;
    * ``parallel/memory_activations_peak/rank_r``, and with a pipeline the same counted in what the rank's forwards save
      for one micro-batch, ``parallel/memory_activations_microbatches/rank_r``, beside
      ``parallel/memory_activations_microbatches_expected/rank_r``, which the schedule says.

    With `ZeROStrategy` and `HybridStrategy` also model states when the step ended, beside the paper's formula: for each
    of parameters, gradients and optimizer ``parallel/memory_KIND/rank_r``, ``parallel/memory_KIND_expected/rank_r``
    (formula, padding, counters, what does not train: equal to the byte) and ``parallel/memory_KIND_formula``.

    Workers of parameter servers wait for nobody in a step: each logs its own alone, and rank 0's are shown.

    Activations are what autograd saves for backwards, without parameters, buffers and the batch. Parameters that stage
    3 has gathered for a step or an action are in ``other``. Each piece of memory counts once. What recomputation under
    activation checkpointing keeps for the length of one backward does not count, nor do temporaries within an
    operation: ``other`` is the batch and what is gathered on a CPU. On a GPU the sums are those of PyTorch's allocator,
    and ``other`` is all that is not in the categories above: the batch, workspaces, temporaries, values in transfer.

    A step is measured if it will be logged, and so is the last one that ``max_steps`` or ``max_epochs`` allow; it is
    logged when the training ends. Hooks on saved tensors and on gradients exist in these steps only, and on a GPU
    these steps begin with ``torch.cuda.reset_peak_memory_stats``. Other steps cost two comparisons. Where gradients
    accumulate, every batch towards such a step is watched, and the last is what is logged.

    Args:
        every_n_steps: measure and log once in so many optimizer steps; None is the Trainer's ``log_every_n_steps``.
        picture: rank 0 writes a PNG of the last measured step here when the training ends; None writes none.
        activations: False leaves activations out. ``torch.func.grad`` and its like raise under hooks on saved tensors,
            so a training step that calls them needs it.

    Raises:
        ValueError: ``every_n_steps`` is below 1.

    Example::

        monitor = MemoryMonitor(picture="memory.png")
        trainer = Trainer(strategy="pipeline_1f1b", devices=4, callbacks=[monitor])
        trainer.fit(model)
        print(monitor.summary())
    """

    measured_attributes = ("reading",)  # rank 0's come back from forked ranks

    def __init__(
        self, every_n_steps: int | None = None, picture: str | Path | None = None, activations: bool = True
    ) -> None:
        self.picture, self.activations = picture, activations
        self.reading: MemoryReading | None = None
        self._is_due = EveryNSteps(self, every_n_steps)
        self._meter: MemoryMeter | None = None
        self._measured: RankMemory | None = None  # the last step, where it was not logged yet

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last ``fit``, and find what is to be counted."""
        device = trainer.strategy.root_device
        self._is_due = EveryNSteps(self, self._is_due.every_n_steps)
        self.reading = self._measured = None
        gathered = getattr(trainer.strategy, "gathered_parameters", tuple)
        allocator = allocator_of(device)
        watch = getattr(trainer.strategy, "watch_gathered", None)
        self._meter = MemoryMeter(pl_module, trainer.optimizers, device, allocator, self.activations, gathered, watch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure, where the step will be logged or is the last."""
        assert self._meter is not None
        ahead = max(1, len(trainer.optimizers))  # under manual optimization a batch may be a step of each
        if self._is_due.is_coming(trainer.global_step, log_every_n_steps(trainer), ahead) or _is_last(trainer, ahead):
            self._meter.begin(batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients that a strategy holds for itself count from here until they are freed."""
        held = getattr(trainer.strategy, "held_gradients", None)
        if held is not None and self._meter is not None:
            self._meter.note_gradients(held())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was measured, on the steps that log."""
        assert self._meter is not None
        is_due = self._is_due(trainer.global_step, log_every_n_steps(trainer))
        self._measured = self._meter.end(batch)
        if is_due and self._measured is not None:
            log_measured(trainer, self._read(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no hooks behind where a batch was skipped."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no hooks behind where a step failed."""
        self._close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last step if it has not been, and draw."""
        self._close()
        if self._measured is not None:
            metrics = self._read(trainer)
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(metrics, step=trainer.global_step)
        if self.picture is not None and self.reading is not None and trainer.is_global_zero:
            Path(self.picture).parent.mkdir(parents=True, exist_ok=True)
            draw_memory(self.picture, self.reading)

    def summary(self) -> str:
        """The last measured step of the last ``fit`` in words: the fullest rank, and the schedule's promise."""
        return "memory: no step was measured" if self.reading is None else self.reading.summary()

    def _read(self, trainer: Trainer) -> dict[str, float]:
        """Bring the ranks' measurements together; every rank calls it at the same step."""
        measured, self._measured = self._measured, None
        schedule, promise = None, None
        if runs_pipeline(trainer):
            stats = stats_of(trainer)
            schedule = stats.latest
            promise = ExpectedActivations.of(schedule, stats.row)
        everyone = _all_gather(trainer, (trainer.global_rank, measured, promise, states_of(trainer)))
        ranks = {rank: memory for rank, memory, _, _ in everyone}
        promises = {rank: promised for rank, _, promised, _ in everyone if promised is not None}
        states = {rank: promised for rank, _, _, promised in everyone if promised is not None}
        self.reading = MemoryReading(trainer.global_step, ranks, schedule, promises, states)
        return self.reading.metrics()

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.close()


def states_of(trainer: Trainer) -> ExpectedStates | None:
    """What the trainer's strategy promises this rank of its model states, None where it divides none."""
    ask = getattr(trainer.strategy, "model_states", None)
    if ask is None:
        return None
    states: ModelStates = ask()
    formula = {kind: float(promise.formula) for kind, promise in states.kinds.items()}
    return ExpectedStates(
        f"stage {states.stage}", formula, {kind: promise.total for kind, promise in states.kinds.items()}
    )


def _is_last(trainer: Trainer, ahead: int) -> bool:
    """Whether the Trainer's own limits end the training with the batch that begins; it may end sooner otherwise."""
    if 0 <= trainer.max_steps <= trainer.global_step + ahead:
        return True
    return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs


def _all_gather(trainer: Trainer, value: Any) -> list[Any]:
    """Every rank's object, in the order of global ranks; strategies that watch over waiting ranks are told."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    waiting = getattr(trainer.strategy, "blocked", lambda what: nullcontext())
    with waiting("the other ranks' memory"):
        dist.all_gather_object(box, value)
    return box
