"""Draw what a training step of a pipeline did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_parallel.callbacks.stats import EveryNSteps, axis_of, require_stats, stats_of
from lightning_parallel.measure.bubble import idle_of, makespan, span_of
from lightning_parallel.measure.lanes import CallLog
from lightning_parallel.measure.perfetto import write_chrome_trace
from lightning_parallel.measure.picture import Panel, draw_timelines
from lightning_parallel.measure.reading import expected_timeline
from lightning_parallel.measure.spans import StepTrace


class TimelineExporter(Callback):
    """Writes a step's timeline as a picture and as a trace for https://ui.perfetto.dev.

    ``timeline/step_000099.png`` shows the measured step above the schedule simulated with its action times, on one
    scale; ``timeline/step_000099.json`` is the same step in the Chrome trace format. Rank 0 writes, all ranks give
    their times. The last step of the training is written as well. Where gradients accumulate, what is drawn is a batch
    after which the optimizer stepped, in which copies talk; files are numbered by batches.

    Below each rank's actions lie lanes, one for each axis of the mesh along which it said something in the batch, from
    its begin to the optimizer's step: ``pipeline`` (values between stages), ``data`` (gradients, what ZeRO gathers),
    ``tensor``. On a CPU a call that runs on by itself ends when the host has waited for it. Calls are timed in batches
    that may be drawn: those that are due, and those in which training may end: the last ones of an epoch and before a
    validation, where callbacks stop it, and all under ``max_time``. Where a step itself sets ``trainer.should_stop``
    in the middle of an epoch, nobody could know, and the last step has no lanes.

    Args:
        dirpath: folder of the files. Left out, ``timeline`` in the trainer's ``log_dir``, or in the working directory
            where there is none.
        every_n_steps: write once in so many optimizer steps. Drawing takes rank 0 about a second.

    Raises:
        ValueError: ``every_n_steps`` is below 1, or the Trainer's strategy runs no pipeline.

    Example::

        trainer = Trainer(strategy="pipeline_1f1b", devices=4, callbacks=[TimelineExporter(every_n_steps=500)])
    """

    measured_attributes = ("files",)  # rank 0's come back from forked ranks

    def __init__(self, dirpath: str | Path | None = None, every_n_steps: int = 100) -> None:
        self.dirpath = dirpath
        self.files: list[Path] = []
        self._is_due = EveryNSteps(self, every_n_steps)
        self._folder = Path()
        self._written: int | None = None
        self._wanted: int | None = None  # a batch after which the optimizer stepped, to be drawn when it can be read
        self._stepped, self._steps = 0, 0  # the latest of them, and the optimizer's steps by then
        self._log: CallLog | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy without a pipeline."""
        require_stats(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree on the folder: ``log_dir`` is a broadcast, so every rank asks for it."""
        self._is_due = EveryNSteps(self, self._is_due.every_n_steps)
        self._written, self._wanted, self.files = None, None, []
        self._stepped, self._steps = 0, trainer.global_step
        self._folder = Path(self.dirpath) if self.dirpath else Path(trainer.log_dir or Path.cwd()) / "timeline"

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to listen, where this batch may be the one that is written: clocks are read a step late."""
        ahead = 2 if trainer.accumulate_grad_batches == 1 else 1
        is_coming = self._is_due.is_coming(trainer.global_step, default=0, ahead=ahead)
        if (is_coming or may_end(trainer, batch_idx)) and not trainer.fit_loop.epoch_loop._should_accumulate():
            self._log = CallLog(axis_of(trainer))
            self._log.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the newest finished step, on the steps that are due."""
        log, stats = self._stop_listening(), stats_of(trainer)
        if log is not None:
            stats.keep_calls(log)
        if trainer.global_step != self._steps:
            self._stepped, self._steps = stats.step, trainer.global_step
        if self._wanted is not None:
            self._write_wanted(self._wanted, trainer)
        if self._is_due(trainer.global_step, default=0):
            if _ends(trainer, batch_idx):
                pass  # `on_train_end` writes this very step, where here the one before could be read
            elif trainer.accumulate_grad_batches == 1:
                self._export(stats.trace(), trainer)
            else:
                self._wanted = self._stepped

    def _write_wanted(self, step: int, trainer: Trainer) -> None:
        """Write a step, if it can be read by now; the steps behind it only accumulate."""
        trace = stats_of(trainer).trace(step)
        if trace is not None and trace.step == step:
            self._wanted = None
            self._export(trace, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last step, or the last one after which the optimizer stepped."""
        stats = stats_of(trainer)
        self._export(stats.last_trace() if self._stepped == stats.step else stats.trace(self._stepped), trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the names of torch.distributed as they were."""
        self._stop_listening()

    def _stop_listening(self) -> CallLog | None:
        log, self._log = self._log, None
        if log is not None:
            log.__exit__(None, None, None)
        return log

    def _export(self, trace: StepTrace | None, trainer: Trainer) -> None:
        if trace is None or trace.step == self._written:
            return
        self._written = trace.step
        if trainer.is_global_zero:
            self.files += write_timeline(self._folder, trace, stats_of(trainer).row_ranks)


def write_timeline(folder: Path, trace: StepTrace, row_ranks: tuple[int, ...]) -> list[Path]:
    """Write the PNG and the JSON of one step and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, events = (folder / f"step_{trace.step:06d}.{suffix}" for suffix in ("png", "json"))
    expected, schedule = expected_timeline(trace), trace.schedule
    panels = [
        Panel(
            f"Measured: {schedule.name}, step {trace.step}",
            trace.rows,
            _note(makespan(trace.rows), idle_of(trace.rows), span_of(trace.rows)),
            trace.lanes,
        ),
        Panel(
            "Simulated: every action takes its measured mean",
            expected.rows,
            _note(expected.makespan, expected.idle, expected.span),
        ),
    ]
    draw_timelines(picture, panels, [_row_label(trace, row, rank) for row, rank in enumerate(row_ranks)])
    write_chrome_trace(events, [trace], row_ranks)
    return [picture, events]


def may_end(trainer: Trainer, batch_idx: int) -> bool:
    """Whether training may end with this batch or the one behind it, as this one may be the newest that can be read."""
    if trainer.max_steps != -1 and trainer.global_step + 2 >= trainer.max_steps:
        return True
    if any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return True
    return batch_idx + 2 >= trainer.num_training_batches or _validates_soon(trainer, batch_idx)


def _ends(trainer: Trainer, batch_idx: int) -> bool:
    """Whether training ends with this batch, as far as its limits say."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    epochs = trainer.max_epochs
    last = epochs is not None and epochs != -1 and trainer.current_epoch + 1 >= epochs
    return last and batch_idx + 1 >= trainer.num_training_batches


def _validates_soon(trainer: Trainer, batch_idx: int) -> bool:
    """Whether a validation comes after this batch or the one behind it; callbacks stop training there."""
    every = trainer.val_check_batch
    if not trainer.enable_validation or not isinstance(every, int) or every < 1:
        return False
    counts_on = trainer.check_val_every_n_epoch is None
    number = trainer.fit_loop.epoch_loop.total_batch_idx if counts_on else batch_idx
    return (number + 1) % every == 0 or (number + 2) % every == 0


def _note(seconds: float, idle: float, span: float) -> str:
    return f"step {seconds:.4g} s, bubble: idle {idle:.3f}, span {span:.3f}"


def _row_label(trace: StepTrace, row: int, rank: int) -> str:
    stages = ", ".join(str(stage) for _, stage in trace.schedule.stages_of(row))
    return f"stage {stages} · rank {rank}"
