"""Runs of pytest in copies of the tree, each forked from a process that has imported torch and Lightning once.

The one idea: a run is a forked process with a copy of the repository as its folder, so that a fault in the copy is
seen by ranks and scripts that its tests start, and the work tree is never touched. What a run leaves behind is ended
with it: this process adopts orphans, and knows a run's by their folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


class Copy:
    """A copy of the files that git has or would add, in a folder of its own.

    Args:
        root: of the repository.
        folder: made anew; short, since sockets lie in it.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "t"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
        for name in listed.strip("\0").split("\0"):
            source, target = root / name, folder / name
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def compile(self) -> None:
        """Byte code that is checked by the text's hash: a fault changes the text within the same second."""
        command = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "checked-hash",
            "lightning_parallel",
        ]
        subprocess.run(command, cwd=self.folder, check=True)

    def enter(self) -> None:
        """Make this process one of the copy: its folder, its package, its temporary folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        os.chdir(self.folder)
        os.environ.update(PYTHONPATH=str(self.folder), TMPDIR=str(self.temporary), OMP_NUM_THREADS="1")
        tempfile.tempdir = None
        root = str(Path(__file__).resolve().parents[2])
        sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in ("", root))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "lightning_parallel")]:
            del sys.modules[name]


@dataclass
class Run:
    """A process that runs pytest in a copy.

    Args:
        pid: of the process, which leads a session.
        copy: where it runs.
        output: what it and pytest print.
        result: what it reports, as JSON; missing if it was ended.
        deadline: when it is ended, by the monotonic clock.
        tag: what it runs for.
    """

    pid: int
    copy: Copy
    output: Path
    result: Path
    began: float
    deadline: float
    tag: Any

    def report(self) -> Any:
        """What it reported; None if it did not come to that."""
        with suppress(OSError, ValueError):
            return json.loads(self.result.read_text())
        return None


def start(fn: Callable[[Copy], Any], copy: Copy, limit_s: float, tag: Any) -> Run:
    """Fork a process that calls ``fn(copy)`` and reports what it returns."""
    output, result = copy.folder / "output.txt", copy.folder / "result.json"
    result.unlink(missing_ok=True)
    now = time.monotonic()
    pid = os.fork()
    if pid:
        return Run(pid, copy, output, result, now, now + limit_s, tag)
    try:
        os.setsid()
        with open(output, "w") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        copy.enter()
        report = json.dumps(fn(copy))
        result.write_text(report)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, so that they can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ended(runs: list[Run]) -> Iterator[Run]:
    """Wait until a run has ended, or its time has; what it started is ended too."""
    now = time.monotonic()
    for run in list(runs):
        over = os.waitpid(run.pid, os.WNOHANG)[0] == run.pid
        if not over and now > run.deadline:
            for pid in _below(run.pid):
                _kill(pid)
            _kill(run.pid)
            os.waitpid(run.pid, 0)
            over = True
        if over:
            runs.remove(run)
            _end_orphans(run, {other.pid for other in runs})
            yield run
    time.sleep(0.02)


def _end_orphans(run: Run, others: set[int]) -> None:
    for pid in _children().get(os.getpid(), []):
        if pid in others:
            continue
        with suppress(OSError):
            if not os.readlink(f"/proc/{pid}/cwd").startswith(str(run.copy.folder)):
                continue
        for descendant in _below(pid):
            _kill(descendant)
        _kill(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    children, found, ahead = _children(), list[int](), [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                found.setdefault(parent, []).append(int(entry))
    return found
