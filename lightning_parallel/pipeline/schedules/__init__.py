"""Schedules by name: every family is one file with one pure function from (stages, micro-batches) to a ``Schedule``.

A new schedule is a new function and one line in ``SCHEDULES``. Each row r of the schedules here holds stage r.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules.gpipe import gpipe
from lightning_parallel.pipeline.schedules.naive import naive
from lightning_parallel.pipeline.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}

__all__ = ["SCHEDULES", "gpipe", "make", "naive", "one_f_one_b"]


def make(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of a name, for a model of so many stages and a step of so many micro-batches.

    Args:
        name: one of ``SCHEDULES``, in any case.
        num_stages: S, >= 1.
        num_microbatches: M, >= 1; fewer micro-batches than stages are allowed.

    Raises:
        ValueError: no schedule has that name, or a number is below 1.

    Example:
        >>> print(make("1f1b", num_stages=2, num_microbatches=3).to_text())
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    generator = SCHEDULES.get(name.lower())
    if generator is None:
        raise ValueError(f"No schedule is called {name!r}. There are: {', '.join(SCHEDULES)}, or give a CSV file.")
    for argument, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"Schedule {name!r} got {argument}={value}. Use 1 or more.")
    return generator(num_stages, num_microbatches)
