"""Staleness as a picture: how often each age of updates and each gap of clocks was, with the bound as a line.

The one idea: a bar past the line would be a broken promise. It looks like the timelines of ``picture``.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_parallel.measure.drawing import FONT, TITLE_FONT, new_figure, own_style, save
from lightning_parallel.measure.palette import AGES, BOUND, GAPS, IDLE, INK, MUTED, PAPER
from lightning_parallel.measure.staleness import StalenessReading, histogram_of, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, LEFT, BETWEEN, TOP, BOTTOM = 9.0, 3.2, 0.65, 0.75, 0.40, 0.55  # inches
HEADROOM = 1.22  # of the tallest bar: room for what is written at the bound
FAR = 4  # times the largest value: a bound beyond is told without a line


def draw_staleness(path: str | PathLike[str], reading: StalenessReading, dpi: int = 150) -> None:
    """Write a PNG with two histograms.

    Args:
        path: of the PNG.
        reading: of all workers.
        dpi: pixels an inch; the picture is 9 inches wide.
    """
    with own_style():
        save(staleness_figure(reading, dpi), path)


def staleness_figure(reading: StalenessReading, dpi: int = 150) -> Figure:
    """The page that `draw_staleness` writes, to be drawn within ``own_style``."""
    figure, sums = new_figure(WIDTH, HEIGHT, dpi), reading.all
    across = (WIDTH - 2 * LEFT - BETWEEN + 0.35) / 2
    left, right = (
        figure.add_axes((at / WIDTH, BOTTOM / HEIGHT, across / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT))
        for at in (LEFT, LEFT + across + BETWEEN)
    )
    _draw(left, sums.ages, reading.version_bound, AGES, "Age of updates")
    _draw(right, sums.gaps, reading.staleness, GAPS, "Gap of clocks")
    left.set_xlabel("others' updates between a read and its write", fontsize=FONT, color=MUTED)
    right.set_xlabel("clocks ahead of the slowest worker at a read", fontsize=FONT, color=MUTED)
    left.set_ylabel("share of updates", fontsize=FONT, color=MUTED)
    right.set_ylabel("share of reads", fontsize=FONT, color=MUTED)
    return figure


def _draw(axes: Axes, counts: Mapping[int, int], bound: int | None, colour: str, subject: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values, often = histogram_of(counts)
    total, most = max(1, sum(often)), values[-1]
    is_near = bound is not None and bound <= FAR * max(most, 3)
    end = max(most, bound if bound is not None and is_near else 0) + 0.9
    axes.set(xlim=(-0.7, end), ylim=(0, HEADROOM * max(often) / total if any(often) else 1))
    axes.bar(values, [one / total for one in often], 0.8, color=colour, edgecolor=PAPER, linewidth=0.5, zorder=3)
    if bound is not None:
        _draw_bound(axes, bound, bound + 0.5 if is_near else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{subject}: mean {mean_of(counts):.2f}, most {max(counts, default=0)}"
    axes.set_title(title, loc="left", fontsize=TITLE_FONT, fontweight="bold", color=INK, pad=6.5)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=MUTED)
    axes.grid(axis="y", color=IDLE, linewidth=1.0, zorder=1)
    axes.spines[["left", "top", "right"]].set_visible(False)


def _draw_bound(axes: Axes, bound: int, at: float | None) -> None:
    """A line with its name on the side that has more room, or the name alone where the line lies far to the right."""
    text: dict[str, Any] = {"va": "top", "fontsize": FONT, "color": BOUND, "textcoords": "offset points", "zorder": 5}
    if at is None:
        axes.annotate(f"bound {bound} →", (1, 1), (-4, -4), xycoords="axes fraction", ha="right", **text)
        return
    low, high = axes.get_xlim()
    is_right = at > (low + high) / 2
    axes.axvline(at, color=BOUND, linewidth=1.5, zorder=4)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "right" if is_right else "left"}
    axes.annotate(f"bound {bound}", (at, 1), (-5 if is_right else 5, -4), **place, **text)
