"""``python -m tests.nets.record [NAME ...]``: writes the snapshots of all layouts anew, or of those named."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from tests.nets import snapshots
from tests.nets.layouts import LAYOUTS
from tests.nets.runs import launched


def main(names: Sequence[str]) -> int:
    """Record; the difference in git says what has changed."""
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        print(f"no layout is called {unknown}; there are {list(LAYOUTS)}", file=sys.stderr)
        return 2
    wanted = [name for name in names or LAYOUTS if is_there(LAYOUTS[name].engine)]
    for count in sorted({LAYOUTS[name].ranks for name in wanted}):
        of_count = [name for name in wanted if LAYOUTS[name].ranks == count]
        for name, runs in launched(of_count, timeout=600.0).items():
            snapshots.write(name, runs)
            print(f"{name}: {snapshots.path_of(name).name}")
    return 0


def is_there(package: str) -> bool:
    """Whether a package is installed; there is always one without a name."""
    return not package or importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
