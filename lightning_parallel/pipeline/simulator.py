"""Schedule and costs in, the time and the memory of every action out.

The one idea: a row runs its actions in order, and each starts as soon as the row is free and everything it needs has
arrived; a value that another row made arrives one hop after it was made. Transfers run beside computation and never
queue. Left out: contention of links, memory other than activations, the time of Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_parallel.measure import bubble
from lightning_parallel.measure.spans import Rows, Span
from lightning_parallel.pipeline import schedule as dependencies
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Action, Schedule

__all__ = ["Costs", "Timeline", "peak_activations", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs.

    Args:
        schedule: what was simulated.
        spans: one tuple of spans a row, in the row's order.
        critical_path: the chain of actions that sets the makespan, first to last.
    """

    schedule: Schedule
    spans: Rows
    critical_path: tuple[Action, ...]

    @property
    def rows(self) -> Rows:
        """The spans, by the name they have in a measured ``StepTrace``."""
        return self.spans

    @cached_property
    def makespan(self) -> float:
        """Time between the first and the last action of all rows."""
        return bubble.makespan(self.spans)

    @cached_property
    def idle(self) -> float:
        """Bubble as the share of all rows' time, see ``measure.bubble.idle_ratio``."""
        return bubble.idle_of(self.spans)

    @cached_property
    def span(self) -> float:
        """Bubble as the share of the longest row's span, see ``measure.bubble.span_ratio``."""
        return bubble.span_of(self.spans)

    @cached_property
    def peak(self) -> list[float]:
        """Most activations that each row holds at a time, see ``peak_activations``."""
        return peak_activations(self.schedule)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on paper.

    Args:
        schedule: any schedule whose actions find what they need.
        costs: time of each kind of action on each stage and of a hop. Left out, 1 for F, I and W, 2 for B, 0 for a hop.

    Returns:
        The ``Timeline``; its times are in the unit of the costs and begin at 0.

    Raises:
        ValueError: an action comes before what it needs, or ``costs`` lacks a stage.

    Example:
        >>> from lightning_parallel.pipeline.schedules import make
        >>> timeline = simulate(make("1f1b", num_ranks=4, num_microbatches=8))
        >>> timeline.makespan, round(timeline.idle, 4), timeline.peak
        (33.0, 0.2727, [4, 3, 2, 1])
    """
    costs = costs or Costs()
    order = schedule.order if costs.pair is None else dependencies.topological_order(schedule, as_one=True)
    times = _times(schedule, costs)
    ends: list[float] = []
    blockers: list[int | None] = []  # the action that decided when this one could start
    rows: list[list[Span]] = [[] for _ in schedule.actions]
    last: list[int | None] = [None for _ in schedule.actions]
    for index, step in enumerate(order):
        action, row = step.action, step.row
        start, blocker = 0.0, None
        if (before := last[row]) is not None:
            start, blocker = ends[before], before
        for need in step.needs:
            arrival = ends[need] + costs.hop(order[need].row, row)
            if arrival > start:
                start, blocker = arrival, need
        ends.append(start + times(action))
        blockers.append(blocker)
        rows[row].append(
            Span(action.kind, action.stage, action.microbatch, start, ends[-1], action.replica, action.slice)
        )
        last[row] = index
    path = tuple(order[index].action for index in _chain(ends, blockers))
    return Timeline(schedule, tuple(map(tuple, rows)), path)


def _times(schedule: Schedule, costs: Costs) -> Callable[[Action], float]:
    """The time of an action; a pair that runs as one is shared out to its two actions as they cost alone."""
    if costs.pair is None:
        return costs.of
    partner: dict[Action, Action] = {}
    for line in schedule.actions:
        for first, second in pairwise(line):
            if first.key in schedule.paired:
                partner |= {first: second, second: first}

    def time(action: Action) -> float:
        if action not in partner:
            return costs.of(action)
        both = costs.of(action) + costs.of(partner[action])
        assert costs.pair is not None
        return costs.pair * costs.of(action) / both if both else costs.pair / 2

    return time


def _chain(ends: list[float], blockers: list[int | None]) -> list[int]:
    """Indices from the first action to the one that ends last, each the reason why the next did not start sooner."""
    index = max(range(len(ends)), key=ends.__getitem__, default=None)
    chain: list[int] = []
    while index is not None:
        chain.append(index)
        index = blockers[index]
    return chain[::-1]


def peak_activations(
    schedule: Schedule, weight_share: float | Sequence[float] = 1.0, kept: Sequence[float] | None = None
) -> list[float]:
    """Most activations each row holds at a time, in activations of one full stage for one micro-batch.

    F stores them; B frees them, or W where the backward is split. Since a row runs in order, no times are needed. When
    S stages lie on D rows a stage counts ``D / S``, and a slice its share of the micro-batch; in a schedule of several
    replicas each one's stage counts so too.

    Args:
        schedule: whose rows are followed.
        weight_share: M_W / M_B, the share of the activations that W still needs after I has run. At 1 nothing is freed
            by I; a transformer block keeps ``32 / (34 + 5 a s / h)`` [1]. One number, or one a stage.
        kept: what each stage's forward keeps, in the unit of the result, where they differ.

    Returns:
        One number a row, an ``int`` where it is whole.

    Example:
        >>> peak_activations(Schedule.from_text("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1"))
        [2, 1]
        >>> peak_activations(Schedule.from_text("0F0 0I0 0F1 0I1 0W0 0W1"), weight_share=0.5)
        [1.5]

    Source:
        [1] Qi et al., arXiv 2401.10241, table 1.
    """
    slices = Counter(action.microbatch for action in schedule.of("F") if action.stage == 0)
    stages = schedule.num_stages
    size = [schedule.num_ranks / stages] * stages if kept is None else kept
    share = weight_share if isinstance(weight_share, Sequence) else [weight_share] * stages
    change = [{"F": 1.0, "B": -1.0, "I": part - 1.0, "W": -part, "U": 0.0} for part in share]
    peaks = []
    for row in schedule.actions:
        live = peak = 0.0
        for action in row:
            live += size[action.stage] / slices[action.microbatch] * change[action.stage][action.kind]
            peak = max(peak, live)
        rounded = round(peak, 9)
        peaks.append(int(rounded) if rounded.is_integer() else rounded)
    return peaks
