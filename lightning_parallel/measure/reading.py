"""The bubble of one measured step beside what was promised, and the history of such readings.

``BubbleMonitor`` logs a reading; here is what one holds, without a Trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

from lightning_parallel.measure import bubble
from lightning_parallel.measure.spans import StepTrace
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.schedules.formulas import bubble_formula, formula_text
from lightning_parallel.pipeline.simulator import Timeline, simulate


@dataclass(frozen=True)
class BubbleReading:
    """The time and bubbles of one step: measured, expected of the schedule with measured action times, by formula.

    Args:
        step: which training step.
        idle: measured, see ``bubble.idle_ratio``.
        span: measured, see ``bubble.span_ratio``.
        idle_expected: of the simulator with this step's mean action times.
        span_expected: of the simulator with this step's mean action times.
        formula: of idle, the closed form for equal actions and no communication; None where there is none.
        busy: seconds each row computed.
        waiting: seconds each row waited for a value to be made.
        transfer: seconds each row waited for a value that was made to arrive.
        shares: of each stage in the time that all stages computed.
        formula_span: of span, as ``formula``.
        seconds: measured, from the first action of any row to the end of the last.
        seconds_expected: of the simulator with this step's mean action times.
    """

    step: int
    idle: float
    span: float
    idle_expected: float
    span_expected: float
    formula: float | None
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    transfer: tuple[float, ...]
    shares: tuple[float, ...] = ()
    formula_span: float | None = None
    seconds: float = 0.0
    seconds_expected: float = 0.0

    @classmethod
    def of(cls, trace: StepTrace) -> BubbleReading:
        """Read a measured step."""
        expected, rows = expected_timeline(trace), trace.rows
        seconds = bubble.busy_seconds(rows), bubble.waiting_seconds(trace), bubble.transfer_seconds(trace)
        return cls(
            trace.step,
            bubble.idle_of(rows),
            bubble.span_of(rows),
            expected.idle,
            expected.span,
            formula_of(trace.schedule),
            *seconds,
            bubble.stage_shares(rows),
            formula_of(trace.schedule, span=True),
            bubble.makespan(rows),
            expected.makespan,
        )

    def metrics(self, row_ranks: Sequence[int], planned_shares: Sequence[float] = ()) -> dict[str, float]:
        """The reading under its log keys; seconds carry the global rank of their row."""
        values = {
            "parallel/bubble_idle": self.idle,
            "parallel/bubble_idle_expected": self.idle_expected,
            "parallel/bubble_span": self.span,
            "parallel/bubble_span_expected": self.span_expected,
            "parallel/step_seconds": self.seconds,
            "parallel/step_seconds_expected": self.seconds_expected,
        }
        if self.formula is not None:
            values["parallel/bubble_idle_formula"] = self.formula
        if self.formula_span is not None:
            values["parallel/bubble_span_formula"] = self.formula_span
        for row, rank in enumerate(row_ranks):
            values[f"parallel/busy_seconds/rank_{rank}"] = self.busy[row]
            values[f"parallel/waiting_seconds/rank_{rank}"] = self.waiting[row]
            values[f"parallel/transfer_seconds/rank_{rank}"] = self.transfer[row]
        values |= {f"parallel/stage_share/stage_{stage}": share for stage, share in enumerate(self.shares)}
        return values | {f"parallel/stage_share_planned/stage_{s}": share for s, share in enumerate(planned_shares)}


def expected_timeline(trace: StepTrace) -> Timeline:
    """What the schedule would take if every action took the mean time it was measured to take."""
    return simulate(_known(trace.schedule), bubble.measured_costs(trace))


@lru_cache(maxsize=8)
def formula_of(schedule: Schedule, span: bool = False) -> float | None:
    """The closed form of the schedule's bubble; None for a schedule of another order, whatever it is called."""
    try:
        named = make(schedule.name, schedule.num_ranks, schedule.num_microbatches)
    except ValueError:
        return None
    if named.actions != schedule.actions:
        return None
    return bubble_formula(schedule.name, schedule.num_ranks, schedule.num_microbatches, span)


@lru_cache(maxsize=8)
def _known(schedule: Schedule) -> Schedule:
    """The first object equal to ``schedule``, which knows its order already: traces arrive with a copy each step."""
    return schedule


@dataclass
class BubbleHistory:
    """The readings of a run, and their medians in words."""

    schedule: Schedule | None = None
    readings: list[BubbleReading] = field(default_factory=list)

    def add(self, trace: StepTrace) -> BubbleReading:
        """Read a step and keep it."""
        reading = BubbleReading.of(trace)
        self.schedule = trace.schedule
        self.readings.append(reading)
        return reading

    def has(self, trace: StepTrace) -> bool:
        """Whether the newest reading is of this step."""
        return bool(self.readings) and self.readings[-1].step == trace.step

    def step_ratio(self) -> float | None:
        """Median over steps of the measured time over the simulated one; None where nothing was measured."""
        ratios = [r.seconds / r.seconds_expected for r in self.readings if r.seconds_expected > 0]
        return median(ratios) if ratios else None

    def summary(self) -> str:
        """The median bubble and step time of the run beside their promises, for people."""
        if self.schedule is None:
            return "bubble: no step was measured"
        schedule, readings = self.schedule, self.readings
        idle, expected = median(r.idle for r in readings), median(r.idle_expected for r in readings)
        promise = f"the schedule with the measured action times {expected:.4f}"
        if (formula := readings[-1].formula) is not None:
            promise = f"formula {formula_text(schedule.name)} = {formula:.4f}, {promise}"
        return (
            f"bubble measured {idle:.4f} beside {promise} ({schedule.name}, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches; idle share, median of {len(readings)} steps){self._times()}"
        )

    def _times(self) -> str:
        ratio = self.step_ratio()
        if ratio is None:
            return ""
        measured, simulated = (median(getattr(r, of) for r in self.readings) for of in ("seconds", "seconds_expected"))
        return f"; step {measured:.4g} s beside {simulated:.4g} s simulated with these times, median ratio {ratio:.4f}"
