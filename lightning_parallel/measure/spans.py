"""What happened when: the trace format that the engine fills, the simulator predicts and the pictures draw.

The one idea: a step is one tuple of spans a pipeline rank (a schedule's row), and predicted and measured time have the
same form. No clock is read here, and nothing is said of how the spans of several ranks got onto one clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parallel.measure.lanes import Lanes
    from lightning_parallel.pipeline.schedule import Schedule

COMPUTE_KINDS = ("F", "B", "I", "W", "U")


@dataclass(frozen=True, slots=True)
class Span:
    """One thing a pipeline rank did, from ``start`` to ``end``.

    Args:
        kind: F, B, I, W or U of an action; ``send`` for a transfer that leaves; ``recv`` for the time the rank waited
            for a value before the action that uses it.
        stage: the stage of the action that computes, sends or waits.
        microbatch: its micro-batch.
        start: seconds, on one clock common to all rows of the step.
        end: seconds, on the same clock.
        replica: its replica.
        slice: its token slice, or None for the whole.
    """

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    replica: int = 0
    slice: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def is_compute(self) -> bool:
        """Whether the rank computed, and did not send or wait."""
        return self.kind in COMPUTE_KINDS

    @property
    def label(self) -> str:
        """The action's text, such as ``2F0``; transfers read ``send 2:0``."""
        return f"{self.stage}{self.kind}{self.microbatch}" if self.is_compute else self._transfer_label

    @property
    def _transfer_label(self) -> str:
        return f"{self.kind} {self.stage}:{self.microbatch}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Span, (self.kind, self.stage, self.microbatch, self.start, self.end, self.replica, self.slice)


Rows = tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class StepTrace:
    """The measured spans of one training step.

    Args:
        step: which step of the training.
        schedule: what the ranks were told to do.
        rows: one tuple of spans a row of the schedule, in the order in which they started.
        lanes: what each row's rank said to others, in the order of its calls; empty where nobody listened.
    """

    step: int
    schedule: Schedule
    rows: Rows
    lanes: Lanes = ()
