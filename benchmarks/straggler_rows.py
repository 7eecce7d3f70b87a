"""Rows of `ssp_stragglers.py`, one a run, in a file from which a stopped benchmark goes on; and their tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

NEAR = 0.07  # how near the virtual clock a speed-up is wanted


@dataclass(frozen=True)
class Row:
    """One run: what it was of, and what came of it.

    Args:
        kind: of stragglers.
        steps: of each worker.
        unit_ms: what a step lasts, milliseconds.
        wanted: loss to which the time is taken.
        name: of the strategy.
        seed: of draws, weights and the order of rows.
        seconds: that the run took.
        promised: times BSP's speed, by the virtual clock.
        to_loss: seconds until the wanted loss was reached, None if it was not.
        loss: of the validation rows after the run.
        load: of the machine, the mean of the minute before the run's end.
        date: of the run.
    """

    kind: str
    steps: int
    unit_ms: float
    wanted: float
    name: str
    seed: int
    seconds: float = 0.0
    promised: float = 0.0
    to_loss: float | None = None
    loss: float = 0.0
    load: float = 0.0
    date: str = ""

    @property
    def part(self) -> tuple[str, int, float, float, str, int]:
        """Which run it is."""
        return (*self.table, self.name, self.seed)

    @property
    def table(self) -> tuple[str, int, float, float]:
        """With which others it is compared."""
        return self.kind, self.steps, self.unit_ms, self.wanted


class Rows:
    """A file with a row a line; one that was not written to its end is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Row]:
        """All rows; of a run that was made twice the last."""
        raw = self.path.read_bytes() if self.path.exists() else b""
        end = raw.rfind(b"\n") + 1
        if end < len(raw):
            os.truncate(self.path, end)
        rows = [Row(**json.loads(line)) for line in raw[:end].splitlines()]
        return list({row.part: row for row in rows}.values())

    def append(self, row: Row) -> None:
        """Write a row, and wait for the disk."""
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """A text for every kind of stragglers: a heading and a table, runs in the order of their rows."""
    for key in dict.fromkeys(row.table for row in rows):
        yield _table([row for row in rows if row.table == key])


def _table(rows: Sequence[Row]) -> str:
    bsp = {row.seed: row for row in rows if row.name == "bsp"}
    head = rows[0]
    loads, dates = [row.load for row in rows], [row.date for row in rows]
    seeds, load = sorted({row.seed for row in rows}), f"load {min(loads):.1f} to {max(loads):.1f}"
    lines = [
        f"{head.kind}: {head.steps} steps, unit {head.unit_ms:g} ms, loss {head.wanted:g}, seeds {seeds}, {load},",
        f"{min(dates)} to {max(dates)}\n",
        f"| run | s/step | x BSP | virtual clock | off by | within {NEAR:.0%} | s to loss | final loss | beside BSP |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.name for row in rows):
        lines.append(_line([row for row in rows if row.name == name], bsp))
    return "\n".join(lines)


def _line(rows: Sequence[Row], bsp: dict[int, Row]) -> str:
    """One strategy: means over seeds; speeds are beside BSP with the same draws."""
    speeds = [bsp[row.seed].seconds / row.seconds if row.seed in bsp else None for row in rows]
    off = [None if speed is None else speed / row.promised - 1 for speed, row in zip(speeds, rows, strict=True)]
    there = [value for value in off if value is not None]
    near = "-" if not there else "yes" if abs(mean(there)) <= NEAR else "**no**"
    cells = [
        spread([row.seconds / row.steps for row in rows], ".4f"),
        spread(speeds, ".2f"),
        spread([row.promised for row in rows], ".2f"),
        spread(off, "+.1%"),
        near,
        spread([row.to_loss for row in rows], ".1f"),
        spread([row.loss for row in rows], ".3f"),
        _beside([row.loss for row in rows], [row.loss for row in bsp.values()]),
    ]
    return f"| {rows[0].name} | {' | '.join(cells)} |"


def _beside(losses: Sequence[float], bsp: Sequence[float]) -> str:
    """How far the mean loss is from BSP's, in standard deviations of BSP's over seeds.

    Example:
        >>> _beside([3.0, 5.0], [1.0, 3.0]), _beside([3.0], [1.0])
        ('+1.4 sd', '-')
    """
    return f"{(mean(losses) - mean(bsp)) / stdev(bsp):+.1f} sd" if len(bsp) > 1 and stdev(bsp) else "-"


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean and sample standard deviation; how many there are where some are missing.

    Example:
        >>> spread([1.0, 3.0], ".1f"), spread([2.0, None], ".1f"), spread([None], ".1f")
        ('2.0 ± 1.4', '2.0 (1 of 2)', '-')
    """
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    text = format(mean(there), form)
    if len(there) > 1:
        text += f" ± {format(stdev(there), form).lstrip('+')}"
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)})"
