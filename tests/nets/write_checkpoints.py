"""``python -m tests.nets.write_checkpoints [NAME ...]``: writes the committed checkpoints anew, or those named.

They are meant to be old. Write them anew only where a change of the format is meant, and say in the changelog what of
older files is still read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.nets import saved
from tests.nets.record import is_there
from tests.nets.runs import versions
from tests.nets.saved import SAVED, Found, Job


def main(names: Sequence[str]) -> int:
    """Write checkpoints and what runs came to that were not cut."""
    unknown = [name for name in names if name not in SAVED]
    if unknown:
        print(f"no checkpoint is called {unknown}; there are {list(SAVED)}", file=sys.stderr)
        return 2
    saved.FOLDER.mkdir(exist_ok=True)
    wanted = [name for name in names or SAVED if SAVED[name].there and is_there(SAVED[name].engine)]
    whole = saved.expected() if (saved.FOLDER / "expected.json").exists() else {}
    for count in sorted({SAVED[name].ranks for name in wanted}):
        of_count = [name for name in wanted if SAVED[name].ranks == count]
        with tempfile.TemporaryDirectory() as folder:
            jobs = [Job(name, save=Path(folder) / name) for name in of_count]
            for name, found in zip(of_count, saved.launched(jobs, timeout=600.0), strict=True):
                saved.pack(name, Path(folder) / name)
                whole[name] = _expected(name, found)
                print(name)
    text = ",\n".join(f'"{name}": {_lines(whole[name])}' for name in SAVED if name in whole)
    (saved.FOLDER / "expected.json").write_text(f"{{\n{text}\n}}\n")
    return 0


def _expected(name: str, found: Sequence[Found]) -> dict[str, Any]:
    if not SAVED[name].certain:
        return {"written with": versions()}
    losses = found[0].losses[saved.BEFORE * saved.BATCHES :]
    weights = saved.whole_shapes(name, saved.whole(found, "weights"))
    return {"written with": versions(), "losses": losses, **saved.summed(weights)}


def _lines(values: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in values.items()) + "\n}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
