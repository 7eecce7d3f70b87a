"""Pictures and Chrome traces of a step."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy
import pytest
from matplotlib import rcParams, style
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from lightning_parallel.measure.drawing import own_style, save
from lightning_parallel.measure.lanes import Transfer, joined
from lightning_parallel.measure.memory import CATEGORIES, RankMemory
from lightning_parallel.measure.memory_picture import draw_memory, memory_figure
from lightning_parallel.measure.memory_reading import ExpectedActivations, MemoryReading
from lightning_parallel.measure.palette import ACTIONS, LANES, MEMORY, PAPER
from lightning_parallel.measure.perfetto import chrome_trace, write_chrome_trace
from lightning_parallel.measure.picture import LANE, ROW_HEIGHT, Panel, draw_timelines, timeline_figure
from lightning_parallel.measure.staleness import StalenessReading, StalenessSums
from lightning_parallel.measure.staleness_picture import draw_staleness, staleness_figure
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.simulator import Costs, simulate
from tests.traces import replay
from tests.unit.test_palette import READABLE, contrast

SAID = (
    (Transfer("pipeline", "send", 8, 101.0, 102.0, (1, 0, 4)),),
    (Transfer("pipeline", "recv", 8, 101.0, 102.0, (1, 0, 4)), Transfer("data", "all_reduce", 4, 103.0, 104.0)),
)
TRACE = replay(make("1f1b", 2, 3), Costs(communication=0.25), step=7)


def channels(colour):
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def colours_of(path):
    red, green, blue = ((imread(path)[:, :, at] * 255).round().astype(int) for at in range(3))
    return {(code >> 16, code >> 8 & 255, code & 255) for code in numpy.unique(red << 16 | green << 8 | blue).tolist()}


def test_a_picture_shows_both_timelines_in_the_colours_of_their_kinds(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    measured, simulated = Panel("measured", TRACE.rows, "note"), Panel("simulated", simulate(TRACE.schedule).rows)
    draw_timelines(one, [measured])
    draw_timelines(two, [measured, simulated], row_labels=["stage 0", "stage 1"])
    assert imread(two).shape[0] > imread(one).shape[0] + 100
    assert {channels(ACTIONS["F"][0]), channels(ACTIONS["B"][0])} <= colours_of(two)
    assert channels(ACTIONS["W"][0]) not in colours_of(two)


def test_lanes_lie_below_each_row(tmp_path):
    without, with_two = tmp_path / "without.png", tmp_path / "with.png"
    draw_timelines(without, [Panel("measured", TRACE.rows)], dpi=100)
    draw_timelines(with_two, [Panel("measured", TRACE.rows, lanes=SAID)], dpi=100)
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


SPLIT = replay(make("zb_v", 2, 4), Costs(communication=0.25), step=7)
TALK = tuple(
    tuple(Transfer(axis, "all_reduce", 4, 101.0 + at, 103.0 + at) for at, axis in enumerate([*LANES, "dataxtensor"]))
    for _ in range(2)
)


def shown(name, ranks, microbatches, title="", note=""):
    rows = simulate(make(name, ranks, microbatches), Costs(1, 1, 1, communication=0.5)).rows
    return timeline_figure([Panel(title or name, rows, note)], seconds=False, dpi=60)


def measured():
    panels = [Panel("Measured: zb_v, step 7", SPLIT.rows, "note", TALK), Panel("Simulated", SPLIT.rows, "idle 0.1")]
    return timeline_figure(panels, ["stage 0, 3 · rank 1", "stage 1, 2 · rank 0"], dpi=60)


def memory(largest, ranks=1):
    """The ranks' activations differ."""
    tables = [{kind: largest // 2**at for at, kind in enumerate(CATEGORIES)} for _ in range(ranks)]
    for rank, table in enumerate(tables):
        table["activations"] += largest * rank // 40
    held = {rank: RankMemory(t, t, t, t["activations"], 8 * t["activations"]) for rank, t in enumerate(tables)}
    schedule = make("1f1b", ranks, 8)
    return MemoryReading(12_345, held, schedule, {rank: ExpectedActivations.of(schedule, rank) for rank in held})


def staleness(bound, ages, gaps):
    return StalenessReading({rank: StalenessSums(Counter(gaps), Counter(ages)) for rank in range(4)}, bound)


FIGURES = {
    "few actions": lambda: shown("1f1b", 2, 2, "1f1b: a title that is long", "idle 0.3"),
    "few actions, many words": lambda: shown("1f1b", 2, 2, "a title of many words " * 4, "and a note of many " * 4),
    "two stages a rank": lambda: shown("v_min", 4, 8),
    "four stages a rank": lambda: shown("interleaved_1f1b:v=4", 2, 8, "a title", "a note"),
    "two replicas": lambda: shown("dualpipe", 4, 8),
    "many micro-batches": lambda: shown("gpipe", 2, 101),
    "measured, with lanes": measured,
    "memory of one rank": lambda: memory_figure(memory(900), dpi=60),
    "memory of twelve ranks": lambda: memory_figure(memory(80 * 2**30, 12), dpi=60),
    "staleness at its bound": lambda: staleness_figure(staleness(3, {0: 9, 21: 1}, {0: 1, 3: 9}), dpi=60),
    "staleness far from it": lambda: staleness_figure(staleness(300, {0: 9, 4: 1}, {2: 1}), dpi=60),
    "staleness of zero": lambda: staleness_figure(staleness(0, {0: 9}, {0: 9}), dpi=60),
    "staleness without": lambda: staleness_figure(staleness(None, {150: 3, 7: 4}, {}), dpi=60),
}


@cache
def drawn(name):
    with own_style():
        figure = FIGURES[name]()
        figure.canvas.draw()
    return figure


@pytest.fixture(params=FIGURES)
def figure(request):
    return drawn(request.param)


def words_of(figure):
    """All that is written beside bars."""
    ticks = []
    for axes in figure.axes:
        for labels, at, (low, high) in (
            (axes.get_xticklabels(), 0, sorted(axes.get_xlim())),
            (axes.get_yticklabels(), 1, sorted(axes.get_ylim())),
        ):
            ticks += [label for label in labels if low <= label.get_position()[at] <= high]
    titles = [
        title for axes in figure.axes for title in (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label)
    ]
    notes = [text for axes in figure.axes for text in axes.texts if isinstance(text, Annotation)]
    return [text for text in (*figure.texts, *ticks, *titles, *notes) if text.get_visible() and text.get_text()]


def bars_of(axes):
    """Of every bar its box in the units of the axes and its colour, what lies on top at the end."""
    found = []
    for drawn in sorted(axes.collections, key=lambda collection: collection.get_zorder()):
        fills = drawn.get_facecolor() if isinstance(drawn, PolyCollection) else ()
        paths = drawn.get_paths() if len(fills) else []
        found += [(path.get_extents(), to_hex(fills[at % len(fills)])) for at, path in enumerate(paths)]
    return found + [(patch.get_bbox(), to_hex(patch.get_facecolor())) for patch in axes.patches]


def test_all_words_are_on_the_page_and_none_lies_on_another(figure):
    boxes = [(text.get_text(), text.get_window_extent()) for text in words_of(figure)]
    page = figure.bbox
    assert len(boxes) > 4
    for text, box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
    swatches = [box for box in figure.findobj(Rectangle) if box.get_gid() == "legend"]
    taken = [*boxes, *((to_hex(swatch.get_facecolor()), swatch.get_window_extent()) for swatch in swatches)]
    pairs = combinations([(name, box.padded(-1)) for name, box in taken], 2)
    beside = [(a, b) for a, b in pairs if not a[0].startswith("#") or not b[0].startswith("#")]  # swatches touch
    assert not [(one, two) for (one, a), (two, b) in beside if a.overlaps(b)]


def test_numbers_lie_in_their_bars_and_are_read(figure):
    for axes in figure.axes:
        bars = bars_of(axes)
        for text in (text for text in axes.texts if not isinstance(text, Annotation)):
            x, y = text.get_position()
            bar, fill = [found for found in bars if found[0].contains(x, y)][-1]
            (left, low), (right, high) = axes.transData.transform([(bar.x0, bar.y0), (bar.x1, bar.y1)])
            box = text.get_window_extent()
            assert left <= box.x0 and box.x1 <= right and min(low, high) <= box.y0 and box.y1 <= max(low, high)
            assert contrast(to_hex(text.get_color()), fill) >= READABLE


def test_every_colour_of_a_bar_is_in_the_legend(figure):
    told = {to_hex(box.get_facecolor()) for box in figure.findobj(Rectangle) if box.get_gid() == "legend"}
    used = {fill for axes in figure.axes for _, fill in bars_of(axes)}
    if not figure.axes[0].get_title(loc="left").startswith("Age"):  # each histogram has one colour and a title
        assert used <= told and len(used) > 2


def test_every_lane_and_what_shades_mean_are_in_the_legend():
    def words(panels):
        with own_style():
            return [text.get_text() for text in timeline_figure(panels).texts]

    assert {f"{axis} axis" for axis in (*LANES, "dataxtensor")} <= set(words([Panel("", SPLIT.rows, lanes=TALK)]))
    assert "darker: a rank's 1st stage, lighter: its 2nd" in words([Panel("", SPLIT.rows)])
    assert "darker: replica 0, lighter: 1" in words([Panel("", simulate(make("chimera", 4, 4)).rows)])
    four = words([Panel("", simulate(make("interleaved_1f1b:v=4", 2, 4)).rows)])
    assert "a to d: a rank's stages 1 to 4, darker and lighter in turn" in four
    assert not [word for word in words([Panel("", TRACE.rows)]) if "darker" in word]


def test_titles_of_staleness_have_a_subject_and_bounds_lie_in_their_axes():
    with own_style():
        for bound, are_near in ((3, (False, True)), (0, (True, True)), (300, (False, False))):
            figure = staleness_figure(staleness(bound, {0: 9, 2: 1}, {0: 1}))
            figure.canvas.draw()
            subjects = "Age of updates: mean 0.20, most 2", "Gap of clocks: mean 0.00, most 0"
            for axes, subject, is_near in zip(figure.axes, subjects, are_near, strict=True):
                assert axes.get_title(loc="left") == subject
                (label,) = [text for text in axes.texts if text.get_text().startswith("bound")]
                box, inside = label.get_window_extent(), axes.get_window_extent()
                assert inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1
                assert bool(axes.lines) == is_near  # where it is far, a line would leave bars no room


def runs(pixels):
    """Colours of a line of pixels, one for those that follow each other."""
    found = []
    for pixel in pixels:
        if not found or found[-1] != pixel:
            found.append(pixel)
    return found


def has_gaps(path, fills):
    """Whether, wherever one of these colours gives way to another, something brighter than both lies between."""
    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    solid, seen = {channels(fill) for fill in fills}, 0
    for line in image[:: max(1, len(image) // 60)]:
        places, pixels = None, [tuple(pixel) for pixel in line.tolist()]
        for at, pixel in enumerate(pixels):
            if pixel in solid:
                if places is not None and pixels[places] != pixel and at - places <= 5:
                    between = pixels[places + 1 : at]
                    if max(map(sum, between), default=0) <= max(sum(pixel), sum(pixels[places])):
                        return False
                    seen += 1
                places = at
    return seen > 3


def test_bars_that_touch_have_a_gap_between_them(tmp_path):
    draw_timelines(tmp_path / "a.png", [Panel("a", SPLIT.rows)], dpi=90)
    assert has_gaps(tmp_path / "a.png", [shade for shades in ACTIONS.values() for shade in shades])
    draw_memory(tmp_path / "b.png", memory(2**20), dpi=90)
    assert has_gaps(tmp_path / "b.png", MEMORY.values())


def test_a_picture_is_the_same_whatever_the_user_set_and_leaves_that_as_it_is(tmp_path):
    def bytes_of(draw, *told):
        draw(tmp_path / "picture.png", *told)
        return (tmp_path / "picture.png").read_bytes()

    for told in (
        (draw_timelines, [Panel("a", SPLIT.rows, lanes=TALK)]),
        (draw_memory, memory(2**20, 2)),
        (draw_staleness, staleness(3, {0: 9, 2: 1}, {0: 1})),
    ):
        plain = bytes_of(*told)
        with style.context(["dark_background", {"font.family": "monospace", "xtick.major.pad": 9}]):
            before = dict(rcParams)
            assert bytes_of(*told) == plain
            assert dict(rcParams) == before


def test_a_file_keeps_the_colours_of_the_palette_and_is_small(tmp_path):
    with own_style():
        figure = timeline_figure([Panel("a", SPLIT.rows, lanes=TALK)])
        save(figure, tmp_path / "a.png")
    drawn = numpy.asarray(figure.canvas.buffer_rgba())[:, :, :3] / 255
    assert abs(imread(tmp_path / "a.png")[:, :, :3] - drawn).mean() < 1e-3  # the edges of letters too
    assert {channels(shade) for kind in "FIW" for shade in ACTIONS[kind]} <= colours_of(tmp_path / "a.png")
    assert channels(PAPER) in colours_of(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size < 60_000


def test_calls_at_the_same_time_lie_one_below_the_other():
    calls = [Transfer("data", "all_reduce", 4, *times) for times in ((101.0, 104.0), (102.0, 103.0), (104.5, 105.0))]
    with own_style():
        figure = timeline_figure([Panel("", TRACE.rows, lanes=(tuple(calls), ()))])
        boxes = [box for box, fill in bars_of(figure.axes[0]) if fill == LANES["data"]]
    first, third, second = sorted(boxes, key=lambda box: (box.y0, box.x0))
    assert first.y1 <= second.y0 + 1e-9 and first.y0 == third.y0 and first.height == second.height == third.height


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
    events = chrome_trace([replace(TRACE, lanes=SAID)], row_ranks=(1, 0))["traceEvents"]
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
