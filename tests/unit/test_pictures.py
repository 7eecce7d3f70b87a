"""Pictures and Chrome traces of a step."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from matplotlib.image import imread

from lightning_parallel.measure.lanes import Transfer, joined
from lightning_parallel.measure.perfetto import chrome_trace, write_chrome_trace
from lightning_parallel.measure.picture import COLOURS, LANE, ROW_HEIGHT, Panel, draw_timelines
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.simulator import Costs, simulate
from tests.traces import replay

LANES = (
    (Transfer("pipeline", "send", 8, 101.0, 102.0, (1, 0, 4)),),
    (Transfer("pipeline", "recv", 8, 101.0, 102.0, (1, 0, 4)), Transfer("data", "all_reduce", 4, 103.0, 104.0)),
)
TRACE = replay(make("1f1b", 2, 3), Costs(communication=0.25), step=7)


def channels(colour):
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def colours_of(path):
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    return set(map(tuple, pixels))


def test_a_picture_shows_both_timelines_in_the_colours_of_their_kinds(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    measured, simulated = Panel("measured", TRACE.rows, "note"), Panel("simulated", simulate(TRACE.schedule).rows)
    draw_timelines(one, [measured])
    draw_timelines(two, [measured, simulated], row_labels=["stage 0", "stage 1"])
    assert imread(two).shape[0] > imread(one).shape[0] + 100
    assert {channels(COLOURS["F"]), channels(COLOURS["B"])} <= colours_of(two)
    assert channels(COLOURS["W"]) not in colours_of(two)


def test_lanes_lie_below_each_row(tmp_path):
    without, with_two = tmp_path / "without.png", tmp_path / "with.png"
    draw_timelines(without, [Panel("measured", TRACE.rows)], dpi=100)
    draw_timelines(with_two, [Panel("measured", TRACE.rows, lanes=LANES)], dpi=100)
    assert imread(with_two).shape[0] - imread(without).shape[0] == round(2 * 2 * LANE * ROW_HEIGHT * 100)  # two of two


def test_many_actions_get_a_wider_picture(tmp_path):
    draw_timelines(tmp_path / "few.png", [Panel("few", simulate(make("1f1b", 2, 2)).rows)], seconds=False, dpi=50)
    draw_timelines(tmp_path / "many.png", [Panel("many", simulate(make("1f1b", 2, 99)).rows)], seconds=False, dpi=50)
    assert imread(tmp_path / "few.png").shape[1] < 600 < imread(tmp_path / "many.png").shape[1] < 1800


def test_nothing_to_draw_is_told(tmp_path):
    with pytest.raises(ValueError, match="There is nothing to draw: 1 timelines hold no action that takes time"):
        draw_timelines(tmp_path / "none.png", [Panel("none", ((), ()))])


def test_matplotlib_loads_when_a_picture_is_drawn_and_not_before():
    code = "import sys, lightning_parallel.measure.picture; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_trace_has_a_lane_a_kind_of_span_and_begins_at_zero(tmp_path):
    write_chrome_trace(tmp_path / "trace.json", [TRACE], row_ranks=(1, 0))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(map(len, TRACE.rows))
    assert min(event["ts"] for event in spans) == 0
    assert {event["cat"]: event["tid"] for event in spans} == {"compute": 0, "recv": 1, "send": 2}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 1 (row 0)",
        "rank 0 (row 1)",
    ]


def test_an_event_says_what_ran():
    (event,) = [e for e in chrome_trace([TRACE])["traceEvents"] if e["name"] == "1B2"]
    assert event["pid"] == 1
    assert event["dur"] == pytest.approx(2e6)
    assert event["args"] == {
        "kind": "B", "stage": 1, "microbatch": 2, "replica": 0, "step": 7, "schedule": "1f1b", "rank": 1,
    }  # fmt: skip


def test_a_value_is_under_way_from_its_send_to_its_receive():
    channel = (1, 0, 4)
    sent = [
        Transfer("pipeline", "send", 8, 100.0, 100.1, channel),
        Transfer("pipeline", "send", 8, 103.0, 103.1, channel),
    ]
    posted = [
        Transfer("pipeline", "recv", 8, 99.0, 101.0, channel),
        Transfer("pipeline", "recv", 8, 101.0, 104.0, channel),
    ]
    other = Transfer("data", "all_reduce", 4, 98.0, 99.0)
    (first, *_), (kept, *received) = joined([sent, [other, *posted]])
    assert (first.start, first.end) == (100.0, 101.0)
    assert [(transfer.start, transfer.end) for transfer in received] == [(100.0, 101.0), (103.0, 104.0)]
    assert kept is other


def test_what_ranks_say_has_a_lane_an_axis_and_its_bytes():
    events = chrome_trace([replace(TRACE, lanes=LANES)], row_ranks=(1, 0))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (sum_of_data,) = [event for event in events if event["name"] == "all_reduce"]
    assert names[1, sum_of_data["tid"]] == "data axis"
    assert sum_of_data["args"] == {"bytes": 4, "step": 7, "schedule": "1f1b", "rank": 0}
    (sent,) = [event for event in events if event["name"] == "send"]
    assert names[0, sent["tid"]] == "pipeline axis"
    assert sent["args"] == {"bytes": 8, "from": 1, "to": 0, "step": 7, "schedule": "1f1b", "rank": 1}


def test_steps_follow_each_other_on_one_clock():
    later = replay(TRACE.schedule, step=8, start=200.0)
    starts = [
        event["ts"] for event in chrome_trace([TRACE, later])["traceEvents"] if event.get("args", {}).get("step") == 8
    ]
    assert min(starts) == pytest.approx(100e6)
