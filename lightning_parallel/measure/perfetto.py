"""Traces in the Chrome trace-event format, which https://ui.perfetto.dev and chrome://tracing open.

Every rank is a process of the viewer with lanes: what it computed, what it waited for, what it sent, and what it said
to others along each axis of the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from lightning_parallel.measure.lanes import Lanes, axes_in
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
    starts = [span.start for trace in traces for row in trace.rows for span in row]
    zero = min([*starts, *(call.start for trace in traces for row in trace.lanes for call in row)], default=0.0)
    axes = axes_in(row for trace in traces for row in trace.lanes)
    events = list(_names(ranks, axes))
    for trace in traces:
        facts = {"step": trace.step, "schedule": trace.schedule.name}
        events += _events(trace.rows, facts, ranks, zero)
        events += _transfers(trace.lanes, axes, facts, ranks, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(
    path: str | PathLike[str], traces: Sequence[StepTrace], row_ranks: Sequence[int] | None = None
) -> None:
    """Write ``chrome_trace`` to a file."""
    with open(path, "w") as file:
        json.dump(chrome_trace(traces, row_ranks), file)


def _names(ranks: Sequence[int], axes: Sequence[str]) -> Iterator[dict[str, Any]]:
    lanes = [(thread, LANE_NAMES[lane]) for lane, thread in LANES.items()]
    lanes += [(len(LANES) + number, f"{axis} axis") for number, axis in enumerate(axes)]
    for row, rank in enumerate(ranks):
        yield {"ph": "M", "name": "process_name", "pid": row, "args": {"name": f"rank {rank} (row {row})"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": row, "args": {"sort_index": row}}
        for thread, name in lanes:
            yield {"ph": "M", "name": "thread_name", "pid": row, "tid": thread, "args": {"name": name}}


def _events(rows: Rows, facts: dict[str, Any], ranks: Sequence[int], zero: float) -> Iterator[dict[str, Any]]:
    for row, spans in enumerate(rows):
        for span in spans:
            yield _event(span, row, zero) | {"args": _arguments(span) | facts | {"rank": ranks[row]}}


def _transfers(
    lanes: Lanes, axes: Sequence[str], facts: dict[str, Any], ranks: Sequence[int], zero: float
) -> Iterator[dict[str, Any]]:
    for row, transfers in enumerate(lanes):
        for transfer in transfers:
            other = {"from": transfer.channel[0], "to": transfer.channel[1]} if transfer.channel else {}
            yield {
                "ph": "X",
                "name": transfer.operation,
                "cat": f"{transfer.axis} axis",
                "pid": row,
                "tid": len(LANES) + axes.index(transfer.axis),
                "ts": (transfer.start - zero) * MICROSECONDS,
                "dur": (transfer.end - transfer.start) * MICROSECONDS,
                "args": {"bytes": transfer.nbytes, **other} | facts | {"rank": ranks[row]},
            }


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
