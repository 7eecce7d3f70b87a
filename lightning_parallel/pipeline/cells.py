"""Schedules as cells of text: one cell an action, or a pair ``0F4&3B2`` that a rank runs as one.

Torch writes a pair as ``(0F4;3B2)OVERLAP_F_B``; both forms are read, the second is written to CSV files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_parallel.pipeline.schedule import Action, Schedule

_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def write_cells(schedule: Schedule, row: int, pair: str) -> Iterator[str]:
    """The cells of a row; ``pair`` is the format of two actions that run as one."""
    line = iter(schedule.actions[row])
    for action in line:
        yield pair.format(action, next(line)) if action.key in schedule.paired else str(action)


def read_cell(cell: str) -> list[str]:
    """The text of each action in a cell: one, or the two of a pair."""
    match = _PAIR.fullmatch(cell.strip())
    return list(match.groups()) if match else cell.split("&")


def placement_of(name: str, rows: Iterable[Iterable[Action]]) -> dict[tuple[int, int], int]:
    """Each (replica, stage) on the row where its actions are.

    Raises:
        ValueError: two rows run one stage of one replica, or there are no actions.
    """
    placement: dict[tuple[int, int], int] = {}
    for index, row in enumerate(rows):
        for action in row:
            first = placement.setdefault((action.replica, action.stage), index)
            if first != index:
                raise ValueError(
                    f"Schedule {name!r} runs stage {action.stage} of replica {action.replica} on row {first} and, "
                    f"with {action}, on row {index}. A stage lies on one row; give the second copy a replica (r1)."
                )
    if not placement:
        raise ValueError(f"Schedule {name!r} has no actions.")
    return placement
