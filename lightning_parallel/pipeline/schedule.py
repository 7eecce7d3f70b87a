"""A pipeline schedule as plain data: which rank does what, in which order.

The one idea: a schedule is a table of actions, one row a pipeline rank, and nothing else. The generators write it, the
checks read it, the simulator prices it, the engine runs it, the pictures and the callbacks draw and measure it: always
this one object. It says nothing of tensors, processes or time.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_parallel.pipeline import cells as cells_of
from lightning_parallel.pipeline import checks, dependencies
from lightning_parallel.pipeline.action import KINDS, Action, Kind


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one training step, in order.

    Args:
        name: what the schedule is called in logs and pictures.
        actions: one tuple of actions a pipeline rank (a *row*), in the order in which the rank runs them.
        placement: which row holds which (replica, stage).
        num_microbatches: M, the micro-batches of one step.
        edges: the (source stage, destination stage) pairs between which activations travel forward and their
            gradients back. Left out, each stage feeds the next one; a skip connection adds its own pair.
        paired: forwards that may run as one with the action right after them in their row: a backward, each hiding the
            other's communication (DualPipe), or the next forward (Chimera's doubling). Who does not know of it runs
            the two one after the other.

    Example:
        >>> schedule = Schedule.from_text("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1")
        >>> schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        (2, 2, 2)
        >>> schedule.check()
        >>> print(schedule.forward_only().to_text())
        0F0 0F1
        1F0 1F1
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: Mapping[tuple[int, int], int]
    num_microbatches: int
    edges: tuple[tuple[int, int], ...] = ()
    paired: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        edges = self.edges or tuple((stage, stage + 1) for stage in range(self.num_stages - 1))
        object.__setattr__(self, "edges", tuple((int(source), int(target)) for source, target in edges))
        object.__setattr__(self, "actions", tuple(tuple(row) for row in self.actions))
        object.__setattr__(self, "placement", dict(self.placement))

    def __hash__(self) -> int:
        return hash((self.name, self.num_ranks, self.num_stages, self.num_microbatches))

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from its fields, so that what was derived and cached is not sent along.
        return Schedule, (self.name, self.actions, self.placement, self.num_microbatches, self.edges, self.paired)

    @property
    def num_ranks(self) -> int:
        """D, the number of rows."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """S, the pieces into which the model is cut."""
        return 1 + max((stage for _, stage in self.placement), default=-1)

    @property
    def num_replicas(self) -> int:
        """How many copies of the model's pipeline the rows hold."""
        return len({replica for replica, _ in self.placement})

    @cached_property
    def location(self) -> dict[Action, tuple[int, int]]:
        """(row, position in the row) of each action, looked up by ``action.key``."""
        return {action.key: (row, at) for row, line in enumerate(self.actions) for at, action in enumerate(line)}

    @cached_property
    def feeds(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By stage: the stages whose activations it takes, and the stages that take its own."""
        takes: dict[int, list[int]] = {}
        gives: dict[int, list[int]] = {}
        for source, target in sorted(self.edges):
            takes.setdefault(target, []).append(source)
            gives.setdefault(source, []).append(target)
        return takes, gives

    @cached_property
    def order(self) -> tuple[dependencies.Step, ...]:
        """All actions in one order that serves every dependency, with the indices of what each one needs.

        Raises:
            ValueError: the rows wait for each other in a circle, or for an action that no row has.
        """
        return dependencies.topological_order(self)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions whose results ``action`` uses, on its own row and on others; the rules are in ``dependencies``."""
        return dependencies.needs(self, action)

    def row_of(self, action: Action) -> int:
        """The row that holds the action's replica and stage."""
        return self.placement[action.replica, action.stage]

    def stages_of(self, row: int) -> tuple[tuple[int, int], ...]:
        """The (replica, stage) pairs that ``row`` holds, sorted."""
        return tuple(sorted(pair for pair, holder in self.placement.items() if holder == row))

    def of(self, *kinds: Kind, row: int | None = None) -> tuple[Action, ...]:
        """Actions of the kinds given, of all rows or of one, in row order."""
        rows = self.actions if row is None else (self.actions[row],)
        return tuple(action for line in rows for action in line if action.kind in kinds)

    def check(self, receive_ahead: int = 2) -> None:
        """Prove that the schedule runs to its end; the rules are in ``checks``.

        Args:
            receive_ahead: the receives of how many coming actions a rank has posted while it waits in a send.

        Raises:
            ValueError: in words, what is missing, misplaced, out of order or blocked.
        """
        checks.check(self, receive_ahead)

    def forward_only(self) -> Schedule:
        """The same schedule without backwards and updates, for evaluation."""
        rows = tuple(self.of("F", row=row) for row in range(self.num_ranks))
        return replace(self, name=f"{self.name} (forward only)", actions=rows, paired=frozenset())

    @cached_property
    def num_slices(self) -> int:
        """K, into how many slices sequences are cut; 0 for whole ones."""
        return len({action.slice for row in self.actions for action in row if action.slice is not None})

    def whole(self) -> Schedule:
        """The same order for whole sequences: each action takes the place of that of its first slice.

        Example:
            >>> print(Schedule.from_text("0F0s0 0F0s1 0F1s0 0F1s1 0B1s1 0B1s0 0B0s1 0B0s0").whole().to_text())
            0F0 0F1 0B1 0B0
        """
        rows = tuple(tuple(dict.fromkeys(replace(action, slice=None) for action in row)) for row in self.actions)
        return replace(self, name=f"{self.name} (whole sequences)", actions=rows) if self.num_slices else self

    def first(self, num_microbatches: int) -> Schedule:
        """The same order for the first micro-batches only: for a batch with too few rows for all of them.

        Raises:
            ValueError: more are asked for than the schedule has.
        """
        if num_microbatches > self.num_microbatches:
            raise ValueError(
                f"Schedule {self.name!r} has {self.num_microbatches} micro-batches, not {num_microbatches}."
            )
        kept = tuple(tuple(a for a in row if a.kind == "U" or a.microbatch < num_microbatches) for row in self.actions)
        if kept == self.actions:
            return self
        partners = {pair for row in self.actions for pair in pairwise(row)}
        paired = self.paired & {pair[0].key for row in kept for pair in pairwise(row) if pair in partners}
        return replace(self, actions=kept, num_microbatches=num_microbatches, paired=paired)

    def to_text(self) -> str:
        """One line a row, actions apart by a space."""
        return "\n".join(" ".join(cells_of.write_cells(self, row, "{}&{}")) for row in range(self.num_ranks))

    @classmethod
    def from_text(cls, text: str, name: str = "text", edges: tuple[tuple[int, int], ...] = ()) -> Schedule:
        """Read rows apart by a new line or a slash, actions apart by blanks or commas."""
        lines = [line for line in text.replace("/", "\n").splitlines() if line.strip()]
        return _from_cells(name, [line.replace(",", " ").split() for line in lines], edges)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write one line a row, as ``torch.distributed.pipelining`` writes and reads its compute-only schedules."""
        with open(path, "w", newline="") as file:
            rows = (cells_of.write_cells(self, row, "({};{})OVERLAP_F_B") for row in range(self.num_ranks))
            csv.writer(file).writerows(rows)

    @classmethod
    def from_csv(cls, path: str | PathLike[str], edges: tuple[tuple[int, int], ...] = ()) -> Schedule:
        """Read a compute-only CSV; stages lie where their actions are, M is what the actions count.

        Empty cells, by which torch pads its rows to a time grid, are skipped: the order is what counts. Torch's
        pairs ``(0F4;3B2)OVERLAP_F_B`` are two actions in that order, paired. The file does not hold ``edges``.

        Raises:
            ValueError: a cell is not an action of computation, or a stage is run by two rows.
        """
        with open(path, newline="") as file:
            cells = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
        while cells and not cells[-1]:
            cells.pop()
        return _from_cells(Path(path).stem, cells, edges)


def _from_cells(name: str, cells: Iterable[Iterable[str]], edges: tuple[tuple[int, int], ...]) -> Schedule:
    rows: list[tuple[Action, ...]] = []
    paired: set[Action] = set()
    for row in cells:
        groups = [[Action.parse(text) for text in cells_of.read_cell(cell)] for cell in row]
        rows.append(tuple(action for group in groups for action in group))
        paired |= {group[0].key for group in groups if len(group) > 1}
    placement = cells_of.placement_of(name, rows)
    microbatches = {action.microbatch for row in rows for action in row if action.kind != "U"}
    return Schedule(name, tuple(rows), placement, 1 + max(microbatches, default=-1), edges, frozenset(paired))


__all__ = ["KINDS", "Action", "Kind", "Schedule"]
