"""What all pictures share: their style, the room that a text takes, a legend in as many lines as it needs, small files.

The one idea: sizes are inches, and texts are measured before a figure is made, so that it is made large enough. Only
matplotlib's Agg canvas is used: no display. The user's own matplotlib settings neither show in a picture nor change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_parallel.measure.palette import INK, PAPER, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 0.20  # inches, around everything
FONT, TITLE_FONT = 9.0, 10.5  # points
HAIRLINE = 0.9  # points: the gap between bars that touch
LEGEND_LINE, SWATCH, SWATCH_HEIGHT, PAD, BETWEEN = 0.21, 0.15, 0.11, 0.07, 0.24  # inches
WIDER = 1.08  # times its outline: a text whose letters are fitted to pixels
COLOURS = 256  # of a file


@contextmanager
def own_style() -> Iterator[None]:
    """A context in which matplotlib has the settings of our pictures and not the user's."""
    from matplotlib import style

    with style.context(["default", dict(STYLE) | {"figure.constrained_layout.use": False}]):
        yield


def text_inches(text: str, size: float = FONT, weight: str = "normal") -> float:
    """The most that a text is wide."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size, weight=weight), False)
    return WIDER * width / 72


def new_figure(width: float, height: float, dpi: int) -> Figure:
    """An empty page of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True)
class Swatch:
    """A box of a legend, from ``bottom`` to ``top`` of its height in one colour, the rest in another."""

    colour: str
    bottom: float = 0.0
    top: float = 1.0
    behind: str = PAPER


@dataclass(frozen=True)
class LegendEntry:
    """A line of a legend: what a colour means, or two of them, or a text alone."""

    label: str
    swatches: tuple[Swatch, ...] = ()

    @property
    def width(self) -> float:
        """Inches."""
        return len(self.swatches) * SWATCH + (PAD if self.swatches else 0.0) + text_inches(self.label)


def in_lines(entries: Sequence[LegendEntry], width: float) -> list[list[LegendEntry]]:
    """Entries one behind the other, and a new line where the last one is full."""
    lines: list[list[LegendEntry]] = [[]]
    for entry in entries:
        if lines[-1] and line_width([*lines[-1], entry]) > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def line_width(entries: Sequence[LegendEntry]) -> float:
    """Inches of a line of a legend."""
    return sum(entry.width for entry in entries) + BETWEEN * (len(entries) - 1)


def draw_legend(figure: Figure, lines: Sequence[Sequence[LegendEntry]], top: float) -> None:
    """Write a legend, flush right, ``top`` inches below the upper edge."""
    width, height = figure.get_size_inches()
    for number, entries in enumerate(lines):
        left, middle = width - MARGIN - line_width(entries), height - top - LEGEND_LINE * (number + 0.5)
        for entry in entries:
            _draw_entry(figure, entry, left, middle)
            left += entry.width + BETWEEN


def _draw_entry(figure: Figure, entry: LegendEntry, left: float, middle: float) -> None:
    width, height = figure.get_size_inches()
    for swatch in entry.swatches:
        bottom = middle - SWATCH_HEIGHT / 2
        for colour, low, high in ((swatch.behind, 0.0, 1.0), (swatch.colour, swatch.bottom, swatch.top)):
            box = (left, bottom + low * SWATCH_HEIGHT, SWATCH - 0.012, (high - low) * SWATCH_HEIGHT)
            _draw_box(figure, box, colour)
        left += SWATCH
    place = (left + (PAD if entry.swatches else 0.0)) / width, middle / height
    figure.text(*place, entry.label, fontsize=FONT, color=INK, va="center_baseline", gid="legend")


def _draw_box(figure: Figure, box: tuple[float, float, float, float], colour: str) -> None:
    from matplotlib.patches import Rectangle

    (width, height), (left, bottom, wide, high) = figure.get_size_inches(), box
    style: dict[str, Any] = {"facecolor": colour, "linewidth": 0, "transform": figure.transFigure, "gid": "legend"}
    figure.add_artist(Rectangle((left / width, bottom / height), wide / width, high / height, **style))


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a PNG of at most 256 colours: the most frequent are kept as they are, others become their nearest."""
    import numpy
    from PIL import Image

    canvas: Any = figure.canvas
    canvas.draw()
    pixels = numpy.asarray(canvas.buffer_rgba())[:, :, :3].astype(numpy.uint32)
    codes = (pixels[:, :, 0] << 16) | (pixels[:, :, 1] << 8) | pixels[:, :, 2]
    found, places, counts = numpy.unique(codes, return_inverse=True, return_counts=True)
    channels = numpy.stack([found >> 16, (found >> 8) & 255, found & 255], axis=1).astype(numpy.int32)
    kept = numpy.argsort(counts, kind="stable")[::-1][:COLOURS]
    distances = ((channels[:, None] - channels[kept][None]) ** 2).sum(axis=2)
    indices = distances.argmin(axis=1).astype(numpy.uint8)[places.reshape(codes.shape)]
    image = Image.fromarray(indices)
    image.putpalette(channels[kept].astype(numpy.uint8).tobytes())
    image.save(path, format="PNG", optimize=True, dpi=(figure.dpi, figure.dpi))
