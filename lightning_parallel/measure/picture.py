"""Timelines as pictures: ranks as rows, actions as boxes coloured by kind, micro-batch numbers inside; lanes below.

The one idea: measured and simulated time have the same form, so one routine draws both, one above the other on one
scale. Matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from lightning_parallel.measure.drawing import (
    BETWEEN,
    FONT,
    HAIRLINE,
    LEGEND_LINE,
    MARGIN,
    TITLE_FONT,
    LegendEntry,
    Swatch,
    draw_legend,
    in_lines,
    new_figure,
    own_style,
    save,
    text_inches,
)
from lightning_parallel.measure.lanes import Lanes, Transfer, axes_in
from lightning_parallel.measure.palette import ACTIONS, IDLE, INK, LINE, MUTED, PAPER, ink_on, lane_colours
from lightning_parallel.measure.spans import Rows, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "U": "update"}
LANE, LANE_DEPTH = 0.55, 3  # of a row: the height of a lane; calls at the same time that lie one below the other
NARROW, WIDE, ROW_HEIGHT, TITLE, NOTE, TOP, BOTTOM = 10.0, 32.0, 0.40, 0.34, 0.20, 0.10, 0.52  # inches
BOX, GAP = 0.84, 0.08  # of a row: the height of a box, the room above and below it
THIN = 0.07  # of a row: a wait in the middle of the track, a send below a box
LETTER_WIDTH, SMALLEST = 0.64, 5.0  # of the font size; points: what is smaller is left out
COMFORTABLE, LETTER_ROOM = 0.19, 0.063  # inches: a box of average length, and what a letter needs in it
SHORTEST = 0.006  # inches: of a call in a lane


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture.

    Args:
        title: what it shows.
        rows: spans of each rank, ``StepTrace.rows`` or ``Timeline.rows``.
        note: numbers to print beside the title.
        lanes: `StepTrace.lanes`: what each row said to others, drawn below it, or empty.
    """

    title: str
    rows: Rows
    note: str = ""
    lanes: Lanes = ()

    @property
    def axes(self) -> list[str]:
        """Of the lanes below each row."""
        return axes_in(self.lanes)

    @property
    def end(self) -> float:
        """Of the last action or call."""
        ends = [span.end for row in self.rows for span in row]
        return max([*ends, *(transfer.end for row in self.lanes for transfer in row)], default=0.0)

    @property
    def pitch(self) -> float:
        """From row to row, in rows."""
        return 1 + LANE * len(self.axes)

    @property
    def height(self) -> float:
        """Of all rows and lanes, in rows."""
        return self.pitch * len(self.rows)

    @property
    def title_width(self) -> float:
        """Inches that title and note take in one line."""
        return text_inches(self.title, TITLE_FONT, "bold") + BETWEEN + text_inches(self.note)


def draw_timelines(
    path: str | PathLike[str],
    panels: Sequence[Panel],
    row_labels: Sequence[str] | None = None,
    seconds: bool = True,
    dpi: int = 150,
) -> None:
    """Write a PNG of timelines, one below the other on one time scale that begins at each one's first action.

    Args:
        path: of the PNG.
        panels: for example the measured step and below it the simulated one.
        row_labels: one a row. Left out, "rank 0", "rank 1", ...
        seconds: whether times are seconds. If not, they are the unit of the costs that were simulated.
        dpi: pixels an inch; the picture is about 11 inches wide, and up to 33 if it shows many actions.

    Raises:
        ValueError: there is nothing to draw.
    """
    with own_style():
        save(timeline_figure(panels, row_labels, seconds, dpi), path)


def timeline_figure(
    panels: Sequence[Panel], row_labels: Sequence[str] | None = None, seconds: bool = True, dpi: int = 150
) -> Figure:
    """The page that `draw_timelines` writes, with the same arguments, to be drawn within ``own_style``."""
    shifted = [_from_zero(panel) for panel in panels]
    end = max((panel.end for panel in shifted), default=0.0)
    if end <= 0:
        raise ValueError(f"There is nothing to draw: {len(panels)} timelines hold no action that takes time.")
    names = row_labels or [f"rank {row}" for row in range(max(len(panel.rows) for panel in shifted))]
    shading, colours = _Shading.of(shifted), lane_colours(axis for panel in shifted for axis in panel.axes)
    left = MARGIN + 0.08 + max(map(text_inches, [*names, *colours]))
    across = _row_width(shifted, end, shading)
    legend = in_lines(_legend(shifted, shading, colours), left + across - MARGIN)
    heads = [TITLE + (NOTE if panel.title_width > across else 0.0) for panel in shifted]
    boxes = [ROW_HEIGHT * panel.height for panel in shifted]
    top = TOP + LEGEND_LINE * len(legend)
    figure = new_figure(left + across + MARGIN, top + sum(heads) + sum(boxes) + BOTTOM, dpi)
    draw_legend(figure, legend, TOP)
    factor, unit = _unit(end) if seconds else (1.0, "time, in units of the costs")
    for index, (panel, head, height) in enumerate(zip(shifted, heads, boxes, strict=True)):
        axes = _place(figure, left, top + head, height)
        _draw_panel(axes, panel, factor, end * factor, names, shading, colours)
        _draw_title(axes, panel, one_line=head == TITLE)
        axes.tick_params(labelbottom=index == len(panels) - 1)
        top += head + height
    axes.set_xlabel(unit, color=MUTED, fontsize=FONT)
    return figure


def _from_zero(panel: Panel) -> Panel:
    starts = [span.start for row in panel.rows for span in row if span.is_compute]
    zero = min([*starts, *(transfer.start for row in panel.lanes for transfer in row)], default=0.0)

    def shifted(row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(replace(s, start=max(0.0, s.start - zero), end=max(0.0, s.end - zero)) for s in row)

    return replace(panel, rows=tuple(map(shifted, panel.rows)), lanes=tuple(map(shifted, panel.lanes)))


@dataclass(frozen=True)
class _Shading:
    """How a picture tells the several stages, or replicas, of a rank apart.

    Two shades take turns. Where a rank has more than two, a letter behind the micro-batch's number says which it is.
    """

    of_replicas: bool
    count: int

    @classmethod
    def of(cls, panels: Sequence[Panel]) -> _Shading:
        chunks = [_chunks(row) for panel in panels for row in panel.rows]
        stages = max(len([replica for replica, _ in row if replica == first]) for row in chunks for first, _ in row)
        replicas = 1 + max(replica for row in chunks for replica, _ in row)
        alone = stages == 1 and replicas > 1
        return cls(alone, replicas if alone else max(map(len, chunks)))

    def chunk(self, span: Span, chunks: Sequence[tuple[int, int]]) -> int:
        """Which of its rank's stages or replicas computes."""
        return span.replica if self.of_replicas else chunks.index((span.replica, span.stage))

    def text(self, span: Span, chunk: int) -> str:
        """What stands in the box."""
        return f"{span.microbatch}{self.letters[chunk]}" if self.count > 2 else str(span.microbatch)

    @property
    def letters(self) -> list[str]:
        """One for each: a to z, then aa, ab, ..."""
        return [(ascii_lowercase[n // 26 - 1] if n >= 26 else "") + ascii_lowercase[n % 26] for n in range(self.count)]

    @property
    def words(self) -> str:
        """What the shades mean, or nothing where there is one."""
        if self.count < 2:
            return ""
        if self.count == 2:
            return (
                "darker: replica 0, lighter: 1" if self.of_replicas else "darker: a rank's 1st stage, lighter: its 2nd"
            )
        which = f"replicas 0 to {self.count - 1}" if self.of_replicas else f"a rank's stages 1 to {self.count}"
        return f"{self.letters[0]} to {self.letters[-1]}: {which}, darker and lighter in turn"


def _chunks(row: Sequence[Span]) -> list[tuple[int, int]]:
    return sorted({(span.replica, span.stage) for span in row if span.is_compute})


def _row_width(panels: Sequence[Panel], end: float, shading: _Shading) -> float:
    """Inches that give the boxes room for their numbers, within reason."""
    boxes = [span for panel in panels for row in panel.rows for span in row if span.is_compute]
    letters = max(len(shading.text(span, 0)) for span in boxes)
    room = max(COMFORTABLE, LETTER_ROOM * (letters + 1))
    return min(WIDE, max(NARROW, room * end * len(boxes) / sum(span.seconds for span in boxes)))


def _unit(seconds: float) -> tuple[float, str]:
    for factor, name in ((1.0, "seconds"), (1e3, "milliseconds")):
        if seconds * factor >= 2:
            return factor, name
    return 1e6, "microseconds"


def _place(figure: Figure, left: float, top: float, height: float) -> Axes:
    width, total = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + height) / total, 1 - (left + MARGIN) / width, height / total))


def _draw_panel(
    axes: Axes,
    panel: Panel,
    factor: float,
    end: float,
    labels: Sequence[str],
    shading: _Shading,
    colours: Mapping[str, str],
) -> None:
    own_end = max(span.end for row in panel.rows for span in row) * factor
    axes.set(xlim=(0, end), ylim=(panel.height, 0))
    ticks: list[tuple[float, str]] = []
    for row, (spans, label) in enumerate(zip(panel.rows, labels, strict=False)):
        top = row * panel.pitch
        axes.broken_barh([(0, own_end)], (top + GAP, BOX), facecolors=IDLE, linewidth=0, zorder=1)
        _draw_row(axes, top, spans, factor, shading)
        ticks += [(top + 0.5, label)]
        for number, axis in enumerate(panel.axes):
            lane = top + 1 + LANE * number
            _draw_lane(axes, lane, [t for t in panel.lanes[row] if t.axis == axis], factor, colours[axis])
            ticks += [(lane + LANE / 2 - GAP, axis)]
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.tick_params(length=0, labelsize=FONT)
    axes.tick_params(axis="x", labelcolor=MUTED)
    axes.grid(axis="x", color=PAPER, linewidth=0.8, zorder=1.5)
    axes.spines[:].set_visible(False)


def _draw_title(axes: Axes, panel: Panel, one_line: bool) -> None:
    inch = axes.figure.dpi  # pixels
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset pixels", "va": "baseline"}
    above = 0.09 + (0.0 if one_line else NOTE)
    title: dict[str, Any] = {"fontsize": TITLE_FONT, "fontweight": "bold", "color": INK}
    axes.annotate(panel.title, (0, 1), (0, above * inch), **title, **place)
    side = {"xy": (1, 1), "ha": "right"} if one_line else {"xy": (0, 1), "ha": "left"}
    axes.annotate(panel.note, xytext=(0, 0.09 * inch), fontsize=FONT, color=MUTED, **side, **place)


def _draw_lane(axes: Axes, top: float, transfers: Sequence[Transfer], factor: float, colour: str) -> None:
    """Calls that run at the same time lie one below the other."""
    depths = _depths(transfers)
    inches = _inches_a_unit(axes)
    height = (LANE - 2 * GAP) / (max(depths, default=0) + 1)
    for depth in sorted(set(depths)):
        bars = [
            (transfer.start * factor, max((transfer.end - transfer.start) * factor, SHORTEST / inches))
            for transfer, own in zip(transfers, depths, strict=True)
            if own == depth
        ]
        widths = [_hairline(width * inches) for _, width in bars]
        style: dict[str, Any] = {"facecolors": colour, "edgecolors": PAPER, "linewidths": widths}
        axes.broken_barh(bars, (top + depth * height, height), zorder=3, **style)


def _depths(transfers: Sequence[Transfer]) -> list[int]:
    """The first line of the lane that is free when a call begins; the last one if none is."""
    free, found = [0.0] * LANE_DEPTH, {}
    for number in sorted(range(len(transfers)), key=lambda n: (transfers[n].start, n)):
        call = transfers[number]
        depth = next((line for line, until in enumerate(free) if until <= call.start), LANE_DEPTH - 1)
        found[number], free[depth] = depth, max(free[depth], call.end)
    return [found[number] for number in range(len(transfers))]


def _inches_a_unit(axes: Axes) -> float:
    low, high = axes.get_xlim()
    return axes.bbox.width / axes.figure.dpi / (high - low)


def _hairline(inches: float) -> float:
    """Points: the gap beside a box, less beside one that is hardly wider."""
    return min(HAIRLINE, inches * 8)


def _draw_row(axes: Axes, row: float, spans: Sequence[Span], factor: float, shading: _Shading) -> None:
    chunks, inches = _chunks(spans), _inches_a_unit(axes)
    for kind, bottom in (("recv", row + (1 - THIN) / 2), ("send", row + GAP + BOX)):
        bars = [(span.start * factor, span.seconds * factor) for span in spans if span.kind == kind]
        axes.broken_barh(bars, (bottom, THIN), facecolors=LINE, linewidth=0, zorder=2)
    boxes = [(span, shading.chunk(span, chunks)) for span in spans if span.is_compute]
    texts = [shading.text(span, chunk) for span, chunk in boxes]
    fills = [ACTIONS[span.kind][chunk % 2] for span, chunk in boxes]
    bars = [(span.start * factor, span.seconds * factor) for span, _ in boxes]
    style: dict[str, Any] = {"edgecolors": PAPER, "linewidths": [_hairline(width * inches) for _, width in bars]}
    axes.broken_barh(bars, (row + GAP, BOX), facecolors=fills, zorder=3, **style)
    longest = max(map(len, texts), default=1)
    for (left, width), text, fill in zip(bars, texts, fills, strict=True):
        size = min(FONT, (width * inches * 72 - 2) / (LETTER_WIDTH * longest))
        if size >= SMALLEST:
            place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 5}
            axes.text(left + width / 2, row + 0.5, text, fontsize=size, color=ink_on(fill), **place)


def _legend(panels: Sequence[Panel], shading: _Shading, colours: Mapping[str, str]) -> list[LegendEntry]:
    kinds = {span.kind for panel in panels for row in panel.rows for span in row}
    entries = [
        LegendEntry(f"{kind}  {NAMES[kind]}", tuple(map(Swatch, dict.fromkeys(shades[: shading.count]))))
        for kind, shades in ACTIONS.items()
        if kind in kinds
    ]
    entries += [LegendEntry(shading.words)] if shading.words else []
    middle = (1 - THIN * 2) / 2
    entries += [LegendEntry("waits for a value", (Swatch(LINE, middle, 1 - middle, IDLE),))] if "recv" in kinds else []
    entries += [LegendEntry("sends", (Swatch(LINE, 0.0, THIN * 2),))] if "send" in kinds else []
    entries += [LegendEntry("idle", (Swatch(IDLE),))]
    return entries + [LegendEntry(f"{axis} axis", (Swatch(colour),)) for axis, colour in colours.items()]
