"""How much of a pipeline's time is waiting: pure functions on spans.

Three definitions of a bubble are in use, and they differ on the same run. Two are here, by name:

* ``idle``: 1 - sum(busy) / (D * step), the share of all ranks' time between the first and the last action;
* ``span``: (cost - work) / cost with cost the longest time between a rank's own first and last action, and work the
  busy time of a rank. It forgives a rank that starts late and ends late, since the next step fills the gap.

The third, bubble over ideal time (Megatron), is ``idle / (1 - idle)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple, cast

from lightning_parallel.measure.spans import Rows, Span, StepTrace
from lightning_parallel.pipeline.costs import Costs
from lightning_parallel.pipeline.schedule import Action, Kind

ROUNDING = 1e-9  # relative: sums of float durations exceed the step they fill by this little


def idle_ratio(busy_seconds: Sequence[float], step_seconds: float) -> float:
    """Share of a training step that the pipeline's ranks spent idle.

    With D ranks, ``1 - sum(busy) / (D * step)``. GPipe and 1F1B with M micro-batches of equal cost have
    ``(D - 1) / (M + D - 1)`` [1].

    Args:
        busy_seconds: compute time of each rank in the step, seconds, one entry a rank.
        step_seconds: wall time of the step, seconds, > 0.

    Returns:
        A number in [0, 1]; 0 means no rank waited.

    Raises:
        ValueError: a busy time exceeds ``step_seconds``.

    Example:
        >>> idle_ratio([0.75, 0.75], 1.0)
        0.25

    Source:
        [1] Huang et al., GPipe, arXiv 1811.06965, section 2.3.
    """
    _require_within(busy_seconds, [step_seconds] * len(busy_seconds))
    return max(0.0, 1.0 - fmean(busy_seconds) / step_seconds)


def stage_shares(rows: Rows) -> tuple[float, ...]:
    """Share of each stage in the time that all stages computed; equal shares leave no rank waiting for another.

    Example:
        >>> stage_shares(((Span("F", 0, 0, 0.0, 1.0),), (Span("F", 1, 0, 1.0, 4.0),)))
        (0.25, 0.75)
    """
    seconds: dict[int, float] = defaultdict(float)
    for span in (span for row in rows for span in row if span.is_compute):
        seconds[span.stage] += span.seconds
    total = sum(seconds.values()) or 1.0
    return tuple(seconds[stage] / total for stage in sorted(seconds))


def span_ratio(busy_seconds: Sequence[float], span_seconds: Sequence[float]) -> float:
    """Share of the longest rank's working span that is not work.

    ``(cost - work) / cost`` with cost the longest span of a rank, from its first start to its last end. The paper [1]
    has work ``M * (T_F + T_I + T_W)``, the same on every rank; where ranks differ it is their mean, so that an
    imbalance counts as a bubble, as it does in ``idle_ratio``.

    Args:
        busy_seconds: compute time of each rank in the step, seconds, one entry a rank.
        span_seconds: last end minus first start of each rank, seconds, one entry a rank.

    Returns:
        A number in [0, 1], at most the ``idle_ratio`` of the same step.

    Raises:
        ValueError: a rank is longer busy than its span.

    Example:
        >>> span_ratio([0.75, 0.75], [0.75, 1.0])
        0.25

    Source:
        [1] Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 5.3.
    """
    _require_within(busy_seconds, span_seconds)
    return max(0.0, 1.0 - fmean(busy_seconds) / max(span_seconds))


def _require_within(busy_seconds: Sequence[float], limits: Sequence[float]) -> None:
    for rank, (busy, limit) in enumerate(zip(busy_seconds, limits, strict=True)):
        if limit <= 0 or busy > limit * (1 + ROUNDING):
            raise ValueError(f"Rank {rank} was busy for {busy} s of {limit} s. Busy times lie within a step of > 0 s.")


def busy_seconds(rows: Rows) -> tuple[float, ...]:
    """Compute time of each row: the actions, without waits and sends."""
    return tuple(sum(span.seconds for span in row if span.is_compute) for row in rows)


def span_seconds(rows: Rows) -> tuple[float, ...]:
    """Time between each row's own first and last action."""
    compute = [[span for span in row if span.is_compute] for row in rows]
    return tuple(max(s.end for s in row) - min(s.start for s in row) if row else 0.0 for row in compute)


def makespan(rows: Rows) -> float:
    """Time between the first action of any row and the last one of any row."""
    compute = [span for row in rows for span in row if span.is_compute]
    return max(span.end for span in compute) - min(span.start for span in compute) if compute else 0.0


def idle_of(rows: Rows) -> float:
    """``idle_ratio`` of rows of spans, measured or simulated; 0 where no time passed."""
    seconds = makespan(rows)
    # Device clocks round every span, so that their sum can pass the whole by a little.
    return idle_ratio([min(busy, seconds) for busy in busy_seconds(rows)], seconds) if seconds > 0 else 0.0


def span_of(rows: Rows) -> float:
    """``span_ratio`` of rows of spans, measured or simulated; 0 where no time passed."""
    seconds = span_seconds(rows)
    busy = [min(busy, limit) for busy, limit in zip(busy_seconds(rows), seconds, strict=True)]
    return span_ratio(busy, seconds) if min(seconds, default=0.0) > 0 else 0.0


def measured_costs(trace: StepTrace) -> Costs:
    """The mean time of each kind of action on each stage, as the simulator takes it, and of a transfer.

    What a transfer takes is seen only where the receiver was already waiting when the value was made: from the end of
    the action that made it to the end of the wait. The median of these is the cost of each hop between two rows.

    Args:
        trace: one measured step.
    """
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in trace.rows:
        for span in row:
            times[span.kind, span.stage].append(span.seconds)
    stages = range(trace.schedule.num_stages)
    means = {kind: [fmean(times.get((kind, stage), [0.0])) for stage in stages] for kind in "FBIWU"}
    whole = [b or i + w for b, i, w in zip(means["B"], means["I"], means["W"], strict=True)]
    return Costs(means["F"], means["I"], means["W"], whole, means["U"], _measured_hops(trace))


def waiting_seconds(trace: StepTrace) -> tuple[float, ...]:
    """Time each row stood before an action because another row had not yet made its input."""
    totals = [0.0] * len(trace.rows)
    for wait in waits(trace):
        totals[wait.row] += wait.made - wait.span.start
    return tuple(totals)


def transfer_seconds(trace: StepTrace) -> tuple[float, ...]:
    """Time each row stood before an action whose input was made and had not arrived: what transfers cost the step.

    Transfers that run beside computation cost nothing here.
    """
    totals = [0.0] * len(trace.rows)
    for wait in waits(trace):
        totals[wait.row] += wait.span.end - wait.made
    return tuple(totals)


class Wait(NamedTuple):
    """A ``recv`` span, the row that stood, the row it stood for (or None) and when that row had made the value."""

    span: Span
    row: int
    source: int | None
    made: float


def waits(trace: StepTrace) -> Iterator[Wait]:
    """Every wait of a step with the last of the values it was for; ``made`` lies within the wait."""
    ends = {_key(span): span.end for row in trace.rows for span in row if span.is_compute}
    for row, spans in enumerate(trace.rows):
        for span, action in _waits(spans):
            remote = [need for need in trace.schedule.needs(action) if trace.schedule.row_of(need) != row]
            made = {trace.schedule.row_of(need): ends[key] for need in remote if (key := _key(need)) in ends}
            source = max(made, key=made.__getitem__, default=None)
            end = span.end if source is None else min(max(made[source], span.start), span.end)
            yield Wait(span, row, source, end)


def _measured_hops(trace: StepTrace) -> dict[tuple[int, int], float]:
    hops: dict[tuple[int, int], list[float]] = defaultdict(list)
    for wait in waits(trace):
        if wait.source is not None and wait.span.start < wait.made:
            hops[wait.source, wait.row].append(wait.span.end - wait.made)
    return {hop: median(seconds) for hop, seconds in hops.items()}


def _waits(spans: Sequence[Span]) -> list[tuple[Span, Action]]:
    """Each wait with the action that stood behind it: the next one that the row ran."""
    found, waits = [], []
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "recv":
            waits.append(span)
        elif span.is_compute:
            kind, piece = cast(Kind, span.kind), span.slice
            action = Action(kind, span.stage, span.microbatch, span.replica, piece)
            found += [(wait, action) for wait in waits]
            waits = []
    return found


def _key(work: Span | Action) -> tuple[str, int, int, int, int | None]:
    return work.kind, work.stage, work.microbatch, work.replica, work.slice
