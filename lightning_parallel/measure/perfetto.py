"""Traces in the Chrome trace-event format, which https://ui.perfetto.dev and chrome://tracing open.

Every rank is a process of the viewer with three lanes: what it computed, what it waited for, what it sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from lightning_parallel.measure.spans import Rows, Span, StepTrace

LANES = {"compute": 0, "recv": 1, "send": 2}
LANE_NAMES = {"compute": "compute", "recv": "waits for a value", "send": "sends"}
MICROSECONDS = 1e6  # the format's unit


def chrome_trace(traces: Sequence[StepTrace], row_ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """The trace of some steps as the JSON object of the trace-event format.

    Args:
        traces: measured steps whose clocks agree; time 0 is their first span.
        row_ranks: global rank of each schedule row, for the lanes' names. Left out, the row numbers.

    Returns:
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}`` with one complete event ("X") a span, times in microseconds.
    """
    num_rows = max((len(trace.rows) for trace in traces), default=0)
    ranks = list(row_ranks) if row_ranks is not None else list(range(num_rows))
    zero = min((span.start for trace in traces for row in trace.rows for span in row), default=0.0)
    events = list(_names(ranks))
    for trace in traces:
        events += _events(trace.rows, {"step": trace.step, "schedule": trace.schedule.name}, ranks, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(
    path: str | PathLike[str], traces: Sequence[StepTrace], row_ranks: Sequence[int] | None = None
) -> None:
    """Write ``chrome_trace`` to a file."""
    with open(path, "w") as file:
        json.dump(chrome_trace(traces, row_ranks), file)


def _names(ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    for row, rank in enumerate(ranks):
        yield {"ph": "M", "name": "process_name", "pid": row, "args": {"name": f"rank {rank} (row {row})"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": row, "args": {"sort_index": row}}
        for lane, thread in LANES.items():
            yield {"ph": "M", "name": "thread_name", "pid": row, "tid": thread, "args": {"name": LANE_NAMES[lane]}}


def _events(rows: Rows, facts: dict[str, Any], ranks: Sequence[int], zero: float) -> Iterator[dict[str, Any]]:
    for row, spans in enumerate(rows):
        for span in spans:
            yield _event(span, row, zero) | {"args": _arguments(span) | facts | {"rank": ranks[row]}}


def _event(span: Span, row: int, zero: float) -> dict[str, Any]:
    lane = "compute" if span.is_compute else span.kind
    return {
        "ph": "X",
        "name": span.label,
        "cat": lane,
        "pid": row,
        "tid": LANES[lane],
        "ts": (span.start - zero) * MICROSECONDS,
        "dur": span.seconds * MICROSECONDS,
    }


def _arguments(span: Span) -> dict[str, Any]:
    return {"kind": span.kind, "stage": span.stage, "microbatch": span.microbatch, "replica": span.replica}
