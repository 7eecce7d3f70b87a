"""The memory of ranks as a picture: a bar a rank, cut by category, at the moment when the rank held most.

The one idea: a bar's length is the rank's peak, and its parts add up to it. Parts say their size where there is room.
Beside each bar stands the sum, and where there is a pipeline how many micro-batches' activations were held of how many
the schedule says. It looks like the timelines of ``picture``.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_parallel.measure.drawing import (
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
from lightning_parallel.measure.memory import CATEGORIES
from lightning_parallel.measure.memory_reading import MemoryReading, in_words
from lightning_parallel.measure.palette import IDLE, INK, MEMORY, MUTED, PAPER, ink_on
from lightning_parallel.measure.picture import BOTTOM, BOX, GAP, ROW_HEIGHT, TITLE, TOP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, NOTE_GAP = 8.0, 0.08  # inches: of the bars, and from a bar to what is written beside it
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def draw_memory(path: str | PathLike[str], reading: MemoryReading, dpi: int = 150) -> None:
    """Write a PNG of what every rank held when it held most.

    Args:
        path: of the PNG.
        reading: one measured step.
        dpi: pixels an inch; the picture is about 11 inches wide.
    """
    with own_style():
        save(memory_figure(reading, dpi), path)


def memory_figure(reading: MemoryReading, dpi: int = 150) -> Figure:
    """The page that `draw_memory` writes, to be drawn within ``own_style``."""
    labels, notes = zip(*((_label(reading, rank), _note(reading, rank)) for rank in reading.in_order), strict=True)
    left, right = (MARGIN + NOTE_GAP + max(map(text_inches, texts)) for texts in (labels, notes))
    kinds = [kind for kind in CATEGORIES if any(memory.at_peak[kind] for memory in reading.ranks.values())]
    entries = [LegendEntry(kind, (Swatch(MEMORY[kind]),)) for kind in kinds]
    if len({memory.peak_bytes for memory in reading.ranks.values()}) > 1:
        entries += [LegendEntry("room up to the fullest rank", (Swatch(IDLE),))]
    legend = in_lines(entries, left + WIDTH - MARGIN)
    top = TOP + LEGEND_LINE * len(legend) + TITLE
    width, height = left + WIDTH + right, top + ROW_HEIGHT * len(labels) + BOTTOM
    figure = new_figure(width, height, dpi)
    draw_legend(figure, legend, TOP)
    axes = figure.add_axes((left / width, BOTTOM / height, WIDTH / width, 1 - (top + BOTTOM) / height))
    _draw_bars(axes, reading, notes)
    axes.set_yticks([row + 0.5 for row in range(len(labels))], labels)
    title: dict[str, Any] = {"fontsize": TITLE_FONT, "fontweight": "bold", "color": INK}
    axes.set_title(f"Memory at its peak, step {reading.step}", loc="left", pad=6.5, **title)
    return figure


def _label(reading: MemoryReading, rank: int) -> str:
    if reading.schedule is None:
        return f"rank {rank}"
    stages = ", ".join(str(stage) for _, stage in reading.schedule.stages_of(reading.promises[rank].row))
    return f"stage {stages} · rank {rank}"


def _note(reading: MemoryReading, rank: int) -> str:
    size = in_words(reading.ranks[rank].peak_bytes)
    if reading.schedule is None:
        return size
    held, expected = reading.microbatches_held(rank), reading.promises[rank].activations
    return f"{size}, {held:.3g} of {expected:g} micro-batches"


def _draw_bars(axes: Axes, reading: MemoryReading, notes: Sequence[str]) -> None:
    ranks = reading.in_order
    most = max(reading.ranks[rank].peak_bytes for rank in ranks)
    unit, name = next((unit, name) for unit, name in UNITS if most >= 2 * unit or unit == 1)
    axes.set(xlim=(0, max(most, 1) / unit), ylim=(len(ranks), 0))
    for row, rank in enumerate(ranks):
        if reading.ranks[rank].peak_bytes < most:
            axes.broken_barh([(0, most / unit)], (row + GAP, BOX), facecolors=IDLE, linewidth=0, zorder=1)
        _draw_parts(axes, row, reading.ranks[rank].at_peak, unit, max(most, 1))
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": FONT}
        offset = (NOTE_GAP * 72, 0)
        axes.annotate(notes[row], (1, row + 0.5), offset, color=MUTED, va="center_baseline", **place)
    axes.set_xlabel(name, color=MUTED, fontsize=FONT)
    axes.tick_params(length=0, labelsize=FONT)
    axes.tick_params(axis="x", labelcolor=MUTED)
    axes.spines[:].set_visible(False)


def _draw_parts(axes: Axes, row: int, sizes: Any, unit: int, most: int) -> None:
    left = 0.0
    for kind in CATEGORIES:
        size, inches, text = sizes[kind] / unit, sizes[kind] / most * WIDTH, in_words(sizes[kind])
        style: dict[str, Any] = {"edgecolors": PAPER, "linewidth": min(HAIRLINE, inches * 8)}
        axes.broken_barh([(left, size)], (row + GAP, BOX), facecolors=MEMORY[kind], zorder=3, **style)
        if sizes[kind] and text_inches(text) + 2 * NOTE_GAP <= inches:
            place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 5}
            axes.text(left + size / 2, row + 0.5, text, fontsize=FONT, color=ink_on(MEMORY[kind]), **place)
        left += size
