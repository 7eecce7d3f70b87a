"""What the callbacks read of a strategy, and how they find it: never a concrete strategy class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from lightning.pytorch import Trainer

from lightning_parallel.measure.lanes import CallLog
from lightning_parallel.measure.spans import StepTrace
from lightning_parallel.pipeline.schedule import Schedule


class PipelineStats(Protocol):
    """``trainer.strategy.stats`` of a strategy that runs a pipeline."""

    @property
    def schedule(self) -> Schedule:
        """What the ranks run in a training step."""

    @property
    def row_ranks(self) -> tuple[int, ...]:
        """Global rank of each row of the schedule."""

    @property
    def row(self) -> int:
        """This rank's row of the schedule."""

    @property
    def latest(self) -> Schedule:
        """What the ranks ran in the newest training step: fewer micro-batches where its batch was short."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each stage in the work, as whoever cut the model expected."""

    def keep_calls(self, log: CallLog) -> None:
        """Take what this rank said to others in the newest step, for the lanes of its trace."""

    @property
    def step(self) -> int:
        """The number of the newest training step, counted in batches."""

    def trace(self, newest: int | None = None) -> StepTrace | None:
        """The newest step before the current one, and none after `newest`, that can be read without waiting for a
        device; collective over a model copy's ranks."""

    def last_trace(self) -> StepTrace | None:
        """Like ``trace``, but of the current step too if it can be read: for the end of a run."""


def require_stats(trainer: Trainer, callback: object) -> None:
    """Refuse a strategy that measures no pipeline.

    Raises:
        ValueError: the trainer's strategy has no ``stats``.
    """
    if not hasattr(trainer.strategy, "stats"):
        raise ValueError(
            f"{type(callback).__name__} measures a pipeline, and the Trainer uses {type(trainer.strategy).__name__}, "
            f'which has none. Use Trainer(strategy="pipeline_1f1b", ...), or remove the callback.'
        )


def runs_pipeline(trainer: Trainer) -> bool:
    """Whether the trainer's strategy has pipeline statistics."""
    return getattr(trainer.strategy, "stats", None) is not None


def stats_of(trainer: Trainer) -> PipelineStats:
    """The trainer's pipeline statistics, once ``require_stats`` passed."""
    return cast(PipelineStats, cast(Any, trainer.strategy).stats)


def axis_of(trainer: Trainer) -> Callable[[Any], str]:
    """What names the axis of the mesh along which a process group's ranks lie; of a plain strategy it is "data"."""
    of_strategy: Callable[[Any], str] = getattr(trainer.strategy, "axis_of", lambda group: "data")
    known: dict[int, str] = {}

    def named(group: Any) -> str:
        if id(group) not in known:
            known[id(group)] = of_strategy(group) or "data"
        return known[id(group)]

    return named


def log_every_n_steps(trainer: Trainer) -> int:
    """The Trainer's own setting, which a monitor takes where it was given none."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
    return every


class EveryNSteps:
    """Says yes once every n optimizer steps, and never twice for one step that accumulates gradients.

    Args:
        callback: whose setting it is, for the message.
        every_n_steps: n, >= 1, or None to be given later.

    Raises:
        ValueError: n is no whole number of 1 or more.
    """

    def __init__(self, callback: object, every_n_steps: int | None) -> None:
        is_count = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool) and every_n_steps >= 1
        if every_n_steps is not None and not is_count:
            raise ValueError(f"{type(callback).__name__}(every_n_steps={every_n_steps!r}) needs 1 or more, or None.")
        self.every_n_steps = every_n_steps
        self._seen = 0

    def __call__(self, step: int, default: int) -> bool:
        """Whether ``step`` optimizer steps are a multiple of n that was not seen before; every rank answers alike."""
        every_n_steps = self.every_n_steps or default
        if step == self._seen or every_n_steps < 1:  # Lightning's log_every_n_steps=0 is never
            return False
        self._seen = step
        return step % every_n_steps == 0

    def is_coming(self, step: int, default: int, ahead: int = 1) -> bool:
        """Whether it will say yes within the next ``ahead`` optimizer steps after ``step``; asks without counting."""
        every_n_steps = self.every_n_steps or default
        return every_n_steps >= 1 and step // every_n_steps < (step + ahead) // every_n_steps
