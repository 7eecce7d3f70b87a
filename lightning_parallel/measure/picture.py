"""Timelines as pictures: ranks as rows, actions as boxes coloured by kind, micro-batch numbers inside; lanes below.

The one idea: measured and simulated time have the same form, so one routine draws both, one above the other on one
scale. Matplotlib is imported when a picture is drawn, and only its Agg canvas is used: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_parallel.measure.lanes import Lanes, Transfer, axes_in
from lightning_parallel.measure.spans import Rows, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": "#3b6fb6", "B": "#4c9f70", "I": "#39a0a3", "W": "#e0a030", "U": "#8a63b0"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "U": "update"}
IDLE, SEND, WAIT, INK, MUTED = "#eceef2", "#c2453d", "#d5d9e0", "#22262e", "#6b7280"
LANE_COLOURS = {"pipeline": "#c2453d", "data": "#8f5a2b", "tensor": "#b0478f"}
LANE = 0.55  # of a row: the height of a lane
NARROW, WIDE, ROW_HEIGHT, PANEL_MARGIN, TOP, BOTTOM = 10.0, 32.0, 0.40, 0.46, 0.20, 0.58  # inches
MARGIN, LETTER = 0.20, 0.073  # inches: beside the rows, and a letter of the labels
BOX, GAP = 0.84, 0.08  # of a row: the height of a box, the room above and below it
DIGIT_WIDTH = 0.64  # of the font size
COMFORTABLE = 0.19  # inches: a box of average length that holds two digits


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shifted = [_from_zero(panel) for panel in panels]
    end = max((panel.end for panel in shifted), default=0.0)
    if end <= 0:
        raise ValueError(f"There is nothing to draw: {len(panels)} timelines hold no action that takes time.")
    heights = [PANEL_MARGIN + ROW_HEIGHT * panel.height for panel in shifted]
    labels = row_labels or [f"rank {row}" for row in range(max(len(panel.rows) for panel in shifted))]
    left = MARGIN + LETTER * max(map(len, labels))
    figure = Figure(
        figsize=(left + MARGIN + _row_width(shifted, end), TOP + sum(heights) + BOTTOM), dpi=dpi, facecolor="white"
    )
    FigureCanvasAgg(figure)
    factor, unit = _unit(end) if seconds else (1.0, "time, in units of the costs")
    top = TOP
    for index, (panel, height) in enumerate(zip(shifted, heights, strict=True)):
        axes = _place(figure, left, top + PANEL_MARGIN, height - PANEL_MARGIN)
        _draw_panel(axes, panel, factor, end * factor, labels)
        axes.tick_params(labelbottom=index == len(panels) - 1)
        top += height
    axes.set_xlabel(unit, color=MUTED, fontsize=9)
    _legend(figure, shifted)
    figure.savefig(path)


def _from_zero(panel: Panel) -> Panel:
    starts = [span.start for row in panel.rows for span in row if span.is_compute]
    zero = min([*starts, *(transfer.start for row in panel.lanes for transfer in row)], default=0.0)

    def shifted(row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(replace(s, start=max(0.0, s.start - zero), end=max(0.0, s.end - zero)) for s in row)

    return replace(panel, rows=tuple(map(shifted, panel.rows)), lanes=tuple(map(shifted, panel.lanes)))


def _row_width(panels: Sequence[Panel], end: float) -> float:
    """Inches that give the boxes room for their numbers, within reason."""
    boxes = [span.seconds for panel in panels for row in panel.rows for span in row if span.is_compute]
    return min(WIDE, max(NARROW, COMFORTABLE * end * len(boxes) / sum(boxes)))


def _unit(seconds: float) -> tuple[float, str]:
    for factor, name in ((1.0, "seconds"), (1e3, "milliseconds")):
        if seconds * factor >= 2:
            return factor, name
    return 1e6, "microseconds"


def _place(figure: Figure, left: float, top: float, height: float) -> Axes:
    width, total = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + height) / total, 1 - (left + MARGIN) / width, height / total))


def _draw_panel(axes: Axes, panel: Panel, factor: float, end: float, labels: Sequence[str]) -> None:
    own_end = max(span.end for row in panel.rows for span in row) * factor
    ticks: list[tuple[float, str]] = []
    for row, (spans, label) in enumerate(zip(panel.rows, labels, strict=False)):
        top = row * panel.pitch
        axes.broken_barh([(0, own_end)], (top + GAP, BOX), facecolors=IDLE, linewidth=0, zorder=1)
        _draw_row(axes, top, spans, factor, end)
        ticks += [(top + 0.5, label)]
        for number, axis in enumerate(panel.axes):
            lane = top + 1 + LANE * number
            _draw_lane(axes, lane, [t for t in panel.lanes[row] if t.axis == axis], factor)
            ticks += [(lane + LANE / 2 - GAP, axis)]
    axes.set(xlim=(0, end), ylim=(panel.height, 0), yticks=[at for at, _ in ticks])
    axes.set_yticklabels([label for _, label in ticks], fontsize=9, color=INK)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)
    axes.tick_params(axis="y", colors=INK)
    axes.grid(axis="x", color="white", linewidth=0.8, zorder=1.5)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=5)
    axes.set_title(panel.note, loc="right", fontsize=9, color=MUTED, pad=5)


def _draw_lane(axes: Axes, top: float, transfers: Sequence[Transfer], factor: float) -> None:
    bars = [(transfer.start * factor, (transfer.end - transfer.start) * factor) for transfer in transfers]
    colour = _lane_colour(transfers[0].axis) if transfers else IDLE
    # What runs at the same time shows through; an edge keeps what is short visible.
    style: dict[str, Any] = {"facecolors": colour, "edgecolors": colour, "linewidth": 0.4, "alpha": 0.6}
    axes.broken_barh(bars, (top, LANE - 2 * GAP), zorder=3, **style)


def _lane_colour(axis: str) -> str:
    return LANE_COLOURS.get(axis, MUTED)


def _draw_row(axes: Axes, row: float, spans: Sequence[Span], factor: float, end: float) -> None:
    chunks = sorted({(span.replica, span.stage) for span in spans if span.is_compute})
    inches = axes.bbox.width / axes.figure.dpi / end
    digits = max((len(str(span.microbatch)) for span in spans), default=1)
    for span in spans:
        left, width = span.start * factor, span.seconds * factor
        if span.kind == "send":
            axes.broken_barh([(left, width)], (row + GAP + BOX, 0.07), facecolors=SEND, linewidth=0, zorder=4)
        elif span.kind == "recv":
            axes.broken_barh([(left, width)], (row + GAP, BOX), facecolors=WAIT, linewidth=0, zorder=1.2)
        else:
            chunk = chunks.index((span.replica, span.stage))
            fill, ink = _shade(COLOURS[span.kind], chunk / max(len(chunks), 2))
            bar = {"facecolors": fill, "edgecolors": "white", "linewidth": min(0.9, width * inches * 8)}
            axes.broken_barh([(left, width)], (row + GAP, BOX), zorder=3, **bar)
            _number(axes, str(span.microbatch), left + width / 2, row + 0.5, _font_size(width * inches, digits), ink)


def _shade(colour: str, share_of_white: float) -> tuple[Any, str]:
    """Later stages of a rank are lighter, as in the papers; the number on them is dark when they are."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    mixed = tuple(channel + (1 - channel) * share_of_white for channel in channels)
    return mixed, "white" if share_of_white < 0.35 else INK


def _font_size(inches: float, digits: int) -> float:
    return min(9.0, (inches * 72 - 2) / (DIGIT_WIDTH * digits))


def _number(axes: Axes, text: str, x: float, y: float, size: float, colour: str) -> None:
    if size >= 4.0:
        axes.text(x, y, text, ha="center", va="center_baseline", fontsize=size, color=colour, zorder=5)


def _legend(figure: Figure, panels: Sequence[Panel]) -> None:
    from matplotlib.patches import Patch

    kinds = {span.kind for panel in panels for row in panel.rows for span in row}
    entries = [Patch(color=COLOURS[kind], label=f"{kind}  {NAMES[kind]}") for kind in COLOURS if kind in kinds]
    entries += [Patch(color=WAIT, label="waits for a value")] if "recv" in kinds else []
    entries += [Patch(color=SEND, label="sends")] if "send" in kinds else []
    entries += [Patch(color=IDLE, label="idle")]
    lanes = dict.fromkeys(axis for panel in panels for axis in panel.axes)
    entries += [Patch(color=_lane_colour(axis), alpha=0.6, label=f"{axis} axis") for axis in lanes]
    width, height = figure.get_size_inches()
    corner = (1 - MARGIN / width, 1 - 0.10 / height)
    style: dict[str, Any] = {
        "frameon": False,
        "fontsize": 9,
        "labelcolor": INK,
        "handlelength": 1.1,
        "columnspacing": 1.6,
    }
    figure.legend(handles=entries, loc="upper right", bbox_to_anchor=corner, ncols=len(entries), borderpad=0, **style)
