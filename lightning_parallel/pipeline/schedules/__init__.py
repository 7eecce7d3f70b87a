"""Schedules by name: every family is one file with pure functions from (ranks, micro-batches) to a ``Schedule``.

A new schedule is a new function and one line in ``SCHEDULES``. How many stages the model is cut into follows from the
ranks and the schedule: ``Schedule.num_stages``, and ``Schedule.placement`` says which rank holds which.
"""

from __future__ import annotations

from typing import Any

from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import spec
from lightning_parallel.pipeline.schedules.automatic import zb_1p, zb_2p, zb_auto
from lightning_parallel.pipeline.schedules.automatic_v import zb_v_auto
from lightning_parallel.pipeline.schedules.bidirectional import chimera, gems
from lightning_parallel.pipeline.schedules.controllable_memory import v_half, v_min
from lightning_parallel.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from lightning_parallel.pipeline.schedules.gpipe import gpipe
from lightning_parallel.pipeline.schedules.interleaved import interleaved_1f1b, interleaved_zb, looped_bfs
from lightning_parallel.pipeline.schedules.naive import naive
from lightning_parallel.pipeline.schedules.one_f_one_b import dapple, one_f_one_b
from lightning_parallel.pipeline.schedules.terapipe import terapipe
from lightning_parallel.pipeline.schedules.zb_v import zb_v
from lightning_parallel.pipeline.schedules.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, spec.Generator] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "dapple": dapple,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_1p": zb_1p,
    "zb_2p": zb_2p,
    "zb_auto": zb_auto,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "zb_v_auto": zb_v_auto,
    "v_half": v_half,
    "v_min": v_min,
    "gems": gems,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "terapipe": terapipe,
}

__all__ = ["SCHEDULES", "find", "make", "spec"]


def make(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """The schedule of a name, for so many pipeline ranks and a step of so many micro-batches.

    Args:
        name: one of ``SCHEDULES``, in any case, hyphens or underscores; options may follow as ``name:v=3``.
        num_ranks: D, >= 1.
        num_microbatches: M, >= 1; fewer micro-batches than ranks are allowed.
        options: of this schedule, such as ``v=3``; they go before those in the name.

    Raises:
        ValueError: no schedule has that name, it does not have such an option, or a number does not fit it.

    Example:
        >>> print(make("1f1b", num_ranks=2, num_microbatches=3).to_text())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
        >>> make("interleaved_1f1b:v=3", 2, 4) == make("interleaved_1f1b", 2, 4, v=3)
        True
    """
    generator, written = find(name)
    for argument, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"Schedule {name!r} got {argument}={value}. Use 1 or more.")
    return generator(num_ranks, num_microbatches, **_known_options(name, generator, written | options))


def find(name: str) -> tuple[spec.Generator, dict[str, Any]]:
    """The generator of a name, and the options written in it.

    Raises:
        ValueError: there is none, or it does not have such an option.
    """
    short, written = spec.parse(name)
    generator = SCHEDULES.get(short)
    if generator is None:
        raise ValueError(f"No schedule is called {name!r}. There are: {', '.join(SCHEDULES)}, or give a CSV file.")
    return generator, _known_options(name, generator, written)


def _known_options(name: str, generator: spec.Generator, given: dict[str, Any]) -> dict[str, Any]:
    known = spec.options_of(generator)
    if unknown := sorted(set(given) - set(known)):
        has = ", ".join(f"{key}={value}" for key, value in known.items()) or "none"
        raise ValueError(f"Schedule {name!r} has no option {unknown[0]!r}. Its options and their defaults: {has}.")
    return given
