"""Measured steps without a measurement: a schedule replayed with given times, in the form the engine records."""

from lightning_parallel.measure import Span, StepTrace
from lightning_parallel.pipeline.simulator import Costs, simulate


def replay(schedule, costs=None, step=0, start=100.0, overhead=0.0):
    """What a machine with these costs would record, on a clock that reads ``start`` when the step begins.

    ``overhead`` is time that every action loses before it starts; the schedule does not know of it.
    """
    costs = costs or Costs()
    slowed = Costs(
        *(cost + overhead for cost in (costs.forward, costs.input_grad, costs.weight_grad)),
        backward=costs.input_grad + costs.weight_grad + overhead,
        communication=costs.communication,
    )
    rows = [
        _row(schedule, row, spans, slowed, overhead, start)
        for row, spans in enumerate(simulate(schedule, slowed).spans)
    ]
    return StepTrace(step, schedule, tuple(rows))


def _row(schedule, row, spans, costs, overhead, start):
    recorded, free = [], 0.0
    for span, action in zip(spans, schedule.actions[row], strict=True):
        if span.start > free:
            recorded.append(_span("recv", span, start + free, start + span.start))
        recorded.append(_span(span.kind, span, start + span.start + overhead, start + span.end))
        free = span.end
        targets = [other for other in range(schedule.num_ranks) if other in (row - 1, row + 1)]
        goes = [target for target in targets if (target > row) == (action.kind == "F")]
        recorded += [_span("send", span, start + span.end, start + span.end + costs.hop(row, to)) for to in goes]
    return tuple(recorded)


def _span(kind, like, start, end):
    return Span(kind, like.stage, like.microbatch, start, end, like.replica)
