"""Staleness as a picture: how often each age of updates and each gap of clocks was, with the bound as a line.

The one idea: a bar past the line would be a broken promise. It looks like the timelines of ``picture``.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

from lightning_parallel.measure.picture import IDLE, INK, MUTED
from lightning_parallel.measure.staleness import StalenessReading, histogram_of, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGES, GAPS, BOUND = "#3b6fb6", "#4c9f70", "#c0504d"


def draw_staleness(path: str | PathLike[str], reading: StalenessReading, dpi: int = 150) -> None:
    """Write a PNG with two histograms.

    Args:
        path: of the PNG.
        reading: of all workers.
        dpi: pixels an inch; the picture is 9 inches wide.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.2), dpi=dpi, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    sums = reading.all
    _draw(left, sums.ages, reading.version_bound, AGES, "others' updates between a read and its write")
    _draw(right, sums.gaps, reading.staleness, GAPS, "clocks ahead of the slowest worker at a read")
    left.set_ylabel("share", fontsize=9, color=INK)
    figure.savefig(path)


def _draw(axes: Axes, counts: Mapping[int, int], bound: int | None, colour: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values, often = histogram_of(counts)
    total = max(1, sum(often))
    axes.bar(values, [one / total for one in often], color=colour, edgecolor="white", linewidth=0.5)
    if bound is not None:
        axes.axvline(bound + 0.5, color=BOUND, linewidth=1.2)
        axes.annotate(f" bound {bound}", (bound + 0.5, axes.get_ylim()[1]), va="top", fontsize=8, color=BOUND)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"mean {mean_of(counts):.2f}, most {max(counts, default=0)}", loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=MUTED)
    axes.set_facecolor(IDLE)
    axes.spines[["top", "right"]].set_visible(False)
