"""The order in which ranks begin the sums of what they share.

The one idea: ranks that share several things begin their sums in one order, or they would wait for each other in a
circle: that in which the last backwards of all that hold a thing come in an order that serves every dependency. It
follows from the schedule, so every rank knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_parallel.pipeline.parameters.table import ParameterEntry, ParameterTable
from lightning_parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class GradientGroup:
    """Parameters that the same rows hold for the same stages: their gradients are ready at one moment."""

    stages: tuple[int, ...]
    rows: tuple[int, ...]
    entries: tuple[ParameterEntry, ...]


def shares_of(table: ParameterTable, alone: bool = False) -> list[GradientGroup]:
    """The parameters that several rows hold, in the order of the model, gathered by stages and rows.

    Args:
        table: the parameters.
        alone: those that one row holds too.
    """
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[ParameterEntry]] = {}
    for entry in table.entries if alone else table.shared():
        found.setdefault((entry.stages, entry.rows), []).append(entry)
    return [GradientGroup(stages, rows, tuple(entries)) for (stages, rows), entries in found.items()]


def plan(schedule: Schedule, shares: Sequence[GradientGroup], row: int) -> list[tuple[int, GradientGroup]]:
    """The shares of a row in the order in which all rows begin their sums, each with the action it waits for.

    Of shares that are ready at one moment those of fewer rows come first, which wait for fewer ranks.

    Returns:
        (number of the action in the row, -1 for none; share), in order.
    """
    numbers = {step.action.key: number for number, step in enumerate(schedule.order)}

    def last(share: GradientGroup, of: int) -> tuple[int, int]:
        """When a row's last backward of a share is: in the order of all actions, and in the row."""
        ends = [
            (numbers[action.key], at)
            for at, action in enumerate(schedule.actions[of])
            if action.stage in share.stages and action.kind in "BIW"
        ]
        return max(ends, default=(-1, -1))

    held = sorted(
        (max(last(share, of) for of in share.rows)[0], len(share.rows), number, share)
        for number, share in enumerate(shares)
    )  # fmt: skip
    return [(last(share, row)[1], share) for *_, share in held if row in share.rows]
