"""Snapshots: one JSON file a layout, one line a weight and one a call; written, read, compared.

The one idea: bits depend on the machine and on torch, the order of collectives on neither. So beside the bits stands a
fingerprint, what a plain run in one process made there. Where this machine makes the same of it, all bits have to be
the same; elsewhere weights are held to one process of this machine within a tolerance. Calls have to be the same
everywhere during training batches. Before and after these Lightning has its say, so that there they are compared where
Lightning's version is the same; and where another library divides the states (FSDP2, DeepSpeed), all of them where that
library's is. Repeated lines and parts are written once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch

from tests.nets.layouts import LAYOUTS
from tests.nets.runs import Run, digest, fingerprint, one_process, versions

FOLDER = Path(__file__).parent / "snapshots"
Parts = Mapping[str, Sequence[str]]


def path_of(name: str) -> Path:
    """The file of a layout."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"


def made_of(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What is written down of a layout's run, one `Run` a rank."""
    snapshot: dict[str, Any] = {
        "layout": name,
        "written with": versions(),
        "fingerprint": fingerprint(name),
        "losses": {f"rank {rank}": run.losses for rank, run in enumerate(runs)},
        "weights": {key: digest(value) for key, value in _of_all(runs, "weights").items()},
        "optimizer": _of_all(runs, "optimizer"),
    }
    if LAYOUTS[name].calls:
        snapshot["calls"] = packed([run.calls for run in runs])
    return snapshot


def _of_all(runs: Sequence[Run], what: str) -> dict[str, Any]:
    """What ranks hold, the first one's first: with sharded checkpoints each tells its part."""
    found: dict[str, Any] = {}
    for run in runs:
        for key, value in getattr(run, what).items():
            found.setdefault(key, value)
    return found


def packed(ranks: Sequence[Parts]) -> dict[str, Any]:
    """Calls with what repeats written once: lines, batches, ranks."""
    found: dict[str, Any] = {}
    for rank, parts in enumerate(ranks):
        same = next((other for other in range(rank) if ranks[other] == parts), None)
        found[f"rank {rank}"] = f"as rank {same}" if same is not None else _packed_parts(parts)
    return found


def _packed_parts(parts: Parts) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (name, lines) in enumerate(parts.items()):
        same = next((other for other in list(parts)[:number] if parts[other] == lines), None)
        runs = [(line, len(list(of))) for line, of in groupby(lines)]
        found[name] = f"as {same}" if same is not None else [f"{n} x {line}" if n > 1 else line for line, n in runs]
    return found


def unpacked(calls: Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """The calls of each rank, by part."""
    found: list[dict[str, list[str]]] = []
    for parts in calls.values():
        if isinstance(parts, str):
            found.append(found[int(parts.removeprefix("as rank "))])
            continue
        own: dict[str, list[str]] = {}
        for name, lines in parts.items():
            own[name] = own[lines.removeprefix("as ")] if isinstance(lines, str) else _unpacked_lines(lines)
        found.append(own)
    return found


def _unpacked_lines(lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    for line in lines:
        repeated = re.match(r"(\d+) x (.*)", line)
        found += [repeated[2]] * int(repeated[1]) if repeated else [line]
    return found


def write(name: str, runs: Sequence[Run]) -> None:
    """Write a layout's snapshot."""
    FOLDER.mkdir(exist_ok=True)
    path_of(name).write_text(json.dumps(made_of(name, runs), indent=1) + "\n")


def read(name: str) -> dict[str, Any]:
    """The snapshot of a layout."""
    return json.loads(path_of(name).read_text())


# -- comparison --------------------------------------------------------------------------------------------------------


def differences_of_calls(name: str, runs: Sequence[Run]) -> list[str]:
    """For each rank whose order of collectives is not the recorded one, where it first differs."""
    snapshot = read(name)
    if "calls" not in snapshot:
        return []
    recorded = unpacked(snapshot["calls"])
    if not _same_version(snapshot, LAYOUTS[name].engine):
        return []
    same_trainer = _same_version(snapshot, "lightning")
    found = []
    for rank, (theirs, run) in enumerate(zip_longest(recorded, runs)):
        for part in dict.fromkeys([*theirs, *run.calls]):
            if part.startswith("batch") or same_trainer:
                difference = _first_difference(theirs.get(part, []), run.calls.get(part, []))
                if difference:
                    found.append(f"{name}: rank {rank}, {part}, {difference}")
                    break
    return found


def _same_version(snapshot: Mapping[str, Any], package: str) -> bool:
    """Whether a package is, but for repairs, the one with which a snapshot was written."""
    then, now = snapshot["written with"].get(package, ""), versions().get(package, "")
    return then.split(".")[:2] == now.split(".")[:2]


def _first_difference(recorded: Sequence[str], now: Sequence[str]) -> str:
    for number, (old, new) in enumerate(zip_longest(recorded, now)):
        if old != new:
            return f"call {number}: recorded {old or 'no further call'!r}, now {new or 'no further call'!r}"
    return ""


def differences_of_bits(
    name: str, runs: Sequence[Run], made_here: Mapping[str, str] | None = None
) -> tuple[list[str], str]:
    """What differs in losses, weights and the optimizer's states; and how it was compared if not to the bit.

    Args:
        name: of the layout.
        runs: one a rank.
        made_here: this machine's fingerprint; it is taken if it is not given.
    """
    snapshot = read(name)
    if snapshot["fingerprint"] == (made_here or fingerprint(name)):
        made = made_of(name, runs)
        found = [
            f"{name}: {what} {key} has other bits than the snapshot"
            for what in ("weights", "optimizer", "losses")
            for key in dict.fromkeys([*snapshot[what], *made[what]])
            if snapshot[what].get(key) != made[what].get(key)
        ]
        return found, ""
    tolerance = LAYOUTS[name].tolerance
    if tolerance is None:
        return [], f"{name}: not compared, one process is not equal"
    found, held = [], _of_all(runs, "weights")
    for key, value in one_process(name).weights.items():
        try:
            torch.testing.assert_close(held[key], value, check_dtype=False, **tolerance)
        except (AssertionError, KeyError) as error:
            found.append(f"{name}: weights {key} beside one process: {error}")
    return found, f"{name}: beside one process within {dict(tolerance)}"
