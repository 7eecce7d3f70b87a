"""The memory of ranks as a picture: a bar a rank, cut by category, at the moment when the rank held most.

The one idea: a bar's length is the rank's peak, and its parts add up to it. Beside each bar stands the number, and
where there is a pipeline how many micro-batches' activations were held of how many the schedule says. It looks like the
timelines of ``picture``.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_parallel.measure.memory import CATEGORIES
from lightning_parallel.measure.memory_reading import MemoryReading, in_words
from lightning_parallel.measure.picture import BOX, GAP, IDLE, INK, LETTER, MARGIN, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "parameters": "#3b6fb6",
    "buffers": "#39a0a3",
    "optimizer": "#8a63b0",
    "gradients": "#4c9f70",
    "activations": "#e0a030",
    "other": "#a9b0bd",
}
WIDTH, ROW_HEIGHT, TOP, BOTTOM = 8.0, 0.40, 0.72, 0.58  # inches
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def draw_memory(path: str | PathLike[str], reading: MemoryReading, dpi: int = 150) -> None:
    """Write a PNG of what every rank held when it held most.

    Args:
        path: of the PNG.
        reading: one measured step.
        dpi: pixels an inch; the picture is about 11 inches wide.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels, notes = zip(*((_label(reading, rank), _note(reading, rank)) for rank in reading.in_order), strict=True)
    left, right = (MARGIN * 2 + LETTER * max(map(len, texts)) for texts in (labels, notes))
    width, height = left + WIDTH + right, TOP + ROW_HEIGHT * len(labels) + BOTTOM
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / width, BOTTOM / height, WIDTH / width, 1 - (TOP + BOTTOM) / height))
    _draw_bars(axes, reading, notes)
    axes.set_yticklabels(labels, fontsize=9, color=INK)
    axes.set_title(f"Memory at its peak, step {reading.step}", loc="left", fontsize=10.5, fontweight="bold", color=INK)
    _legend(figure, reading)
    figure.savefig(path)


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


def _draw_bars(axes: Axes, reading: MemoryReading, notes: tuple[str, ...]) -> None:
    ranks = reading.in_order
    most = max(reading.ranks[rank].peak_bytes for rank in ranks)
    unit, name = next((unit, name) for unit, name in UNITS if most >= 2 * unit or unit == 1)
    for row, rank in enumerate(ranks):
        axes.broken_barh([(0, most / unit)], (row + GAP, BOX), facecolors=IDLE, linewidth=0, zorder=1)
        left = 0.0
        for kind in CATEGORIES:
            size = reading.ranks[rank].at_peak[kind] / unit
            axes.broken_barh([(left, size)], (row + GAP, BOX), facecolors=COLOURS[kind], linewidth=0, zorder=3)
            left += size
        place: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(notes[row], (most / unit, row + 0.5), color=MUTED, annotation_clip=False, **place)
    axes.set(xlim=(0, most / unit), ylim=(len(ranks), 0), yticks=[row + 0.5 for row in range(len(ranks))])
    axes.set_xlabel(name, color=MUTED, fontsize=9)
    axes.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, reading: MemoryReading) -> None:
    from matplotlib.patches import Patch

    kinds = [kind for kind in CATEGORIES if any(memory.at_peak[kind] for memory in reading.ranks.values())]
    entries = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    width, height = figure.get_size_inches()
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 1.1}
    corner = (1 - MARGIN / width, 1 - 0.10 / height)
    figure.legend(handles=entries, loc="upper right", bbox_to_anchor=corner, ncols=len(entries), borderpad=0, **style)
