"""Log how much of a pipeline's time is waiting, beside what was promised."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel.callbacks.logged import log_measured
from lightning_parallel.callbacks.stats import EveryNSteps, log_every_n_steps, require_stats, stats_of
from lightning_parallel.measure.reading import BubbleHistory
from lightning_parallel.measure.spans import StepTrace


class BubbleMonitor(Callback):
    """Logs the measured bubble of a training step, the expected one and the formula, to every logger.

    Keys, each the same number on every rank:

    * ``parallel/bubble_idle``, ``parallel/bubble_span``: measured, by the two definitions of ``measure.bubble``;
    * the same with ``_expected``: the schedule simulated with this run's measured action times, so that the difference
      is what the engine adds to the schedule;
    * the same with ``_formula``: the closed form, for schedules that have one;
    * ``parallel/step_seconds``: from the first action of any rank to the end of the last, and ``_expected``, as above;
    * ``parallel/busy_seconds/rank_r``: time in actions; ``parallel/waiting_seconds/rank_r``: time before an action
      whose input another rank had not made yet; ``parallel/transfer_seconds/rank_r``: time before one whose input was
      made and on its way;
    * ``parallel/stage_share/stage_s``: the stage's part of all computation, beside ``_planned``, which the partition
      expected (of parameters, FLOPs, time or blocks: what it balances).

    Clocks are read a step late, so that no device has to be waited for: what is logged at step k was measured in
    step k - 1, and the last step is logged when the training ends. Ranks exchange their times only on steps that log.

    Args:
        every_n_steps: log once in so many optimizer steps; None is the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: ``every_n_steps`` is below 1, or the Trainer's strategy runs no pipeline.

    Example::

        monitor = BubbleMonitor()
        trainer = Trainer(strategy="pipeline_1f1b", devices=4, callbacks=[monitor])
        trainer.fit(model)
        print(monitor.summary())
    """

    measured_attributes = ("_history",)  # rank 0's come back from forked ranks

    def __init__(self, every_n_steps: int | None = None) -> None:
        self._is_due = EveryNSteps(self, every_n_steps)
        self._history = BubbleHistory()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy without a pipeline, and start a new history."""
        require_stats(trainer, self)
        if stage == "fit":
            self._is_due = EveryNSteps(self, self._is_due.every_n_steps)
            self._history = BubbleHistory()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the newest finished step, on the steps that log."""
        if self._is_due(trainer.global_step, log_every_n_steps(trainer)):
            log_measured(trainer, self._read(stats_of(trainer).trace(), trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last step, which no later batch could."""
        metrics = self._read(stats_of(trainer).last_trace(), trainer)
        if metrics and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def summary(self) -> str:
        """The median measured bubble and step of the last ``fit`` beside formula and expectation, one line."""
        return self._history.summary()

    def step_ratio(self) -> float | None:
        """What a step of the last ``fit`` took over what the simulator gives for its action times, the median."""
        return self._history.step_ratio()

    def _read(self, trace: StepTrace | None, trainer: Trainer) -> dict[str, float]:
        if trace is None or self._history.has(trace):
            return {}
        stats = stats_of(trainer)
        return self._history.add(trace).metrics(stats.row_ranks, stats.shares)
