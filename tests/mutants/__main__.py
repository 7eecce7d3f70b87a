"""`python -m tests.mutants`: puts faults into the package, one at a time, and says which no test sees.

    python -m tests.mutants                           # 200 faults, drawn with seed 0
    python -m tests.mutants --seed 1 --number 50      # others
    python -m tests.mutants --again survivors         # after tests were written: those that survived unexplained
    python -m tests.mutants --record-only             # which tests reach which statement, nothing else

A fault is drawn from all that `operators.py` can make in a folder, at most one in a function; folders get their share
by the square root of their number. It is run in a copy of the tree: the tests that reach its statement, nearest first
(short ones that reach little else), until one fails, for at most BUDGET seconds of tests by what they took when they
were recorded. A test that takes far longer than it did counts as one that fails. Tests marked slow do not take part.

Results are lines of JSON in `.mutants/`, one a fault; a fault that was run is not run again but by `--again`. Survivors
that change nothing that a user can see are explained in `explained.toml`. The exit code is 1 if fewer than 90 % were
killed, or a survivor is not explained.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import math
import mmap
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomllib

from tests.mutants import operators, reach, runs
from tests.mutants.operators import Mutant
from tests.mutants.reach import Place, Recorded, Records

FOLDERS = ("zero", "parallel", "failure", "checkpoint", "trainer", "pipeline", "measure")
ROOT = Path(__file__).resolve().parents[2]
KILLED_SHARE = 0.9
BUDGET_S = 20.0  # of tests, for a fault
VARIANTS = 6  # tests of one function with other parameters, at that budget
RECORD_LIMIT_S = 1200.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(arguments)
    records = Records(options.output / "reach", ROOT)
    files = reach.files_of_tests(ROOT)
    drawn = draw(options.seed, options.number)
    results = Results(options.output / f"seed-{options.seed}.jsonl")
    if not options.report_only:
        reach.warm()
        runs.adopt_orphans()
        with tempfile.TemporaryDirectory(prefix="m") as folder:
            missing = records.missing(files)
            if missing:
                record(missing, records, Path(folder), options.jobs)
            if not options.record_only:
                pending = [mutant for mutant in drawn if _is_to_run(mutant, results, options)]
                run_all(pending, records.tests(files), results, Path(folder), options.jobs, options.budget)
    return 0 if options.record_only else tell(drawn, results)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--number", type=int, default=200, help="of faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of tests for a fault")
    parser.add_argument("--again", choices=("survivors", "all"), help="run those again that were run")
    parser.add_argument("--only", default="", help="only faults whose key holds this text")
    parser.add_argument("--output", type=Path, default=ROOT / ".mutants", help="folder of records and results")
    parser.add_argument("--record-only", action="store_true", help="stop when it is known which tests reach what")
    parser.add_argument("--report-only", action="store_true", help="print what was found before")
    return parser.parse_args(arguments)


def _is_to_run(mutant: Mutant, results: Results, options: argparse.Namespace) -> bool:
    before = results.of(mutant)
    if options.only not in mutant.key:
        return False
    survived = before is not None and not before["killed"] and mutant.key not in _explained()["survivors"]
    return before is None or options.again == "all" or (options.again == "survivors" and survived)


# -- the draw ----------------------------------------------------------------------------------------------------------


def draw(seed: int, number: int, folders: Sequence[str] = FOLDERS, root: Path = ROOT) -> list[Mutant]:
    """So many faults; a greater number has the same ones and more in each folder.

    Each has a number that follows from the seed and its key, and the least are drawn: a change of the package changes
    the draw in what it touches.
    """
    chosen: list[Mutant] = []
    candidates = {folder: _candidates(root, folder) for folder in folders}
    for folder, quota in _quotas({folder: len(found) for folder, found in candidates.items()}, number).items():
        found = sorted(candidates[folder], key=lambda mutant: _lot(seed, mutant))
        functions, taken = set[tuple[str, str]](), 0
        for mutant in found:
            where = (mutant.path, mutant.function)
            if taken < quota and where not in functions and operators.compiles(
                mutant.apply((root / mutant.path).read_bytes())
            ):  # fmt: skip
                functions.add(where)
                chosen.append(mutant)
                taken += 1
    return chosen


def _lot(seed: int, mutant: Mutant) -> bytes:
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()


def _candidates(root: Path, folder: str) -> list[Mutant]:
    left_out = _explained()["elsewhere"]
    return [
        mutant
        for path in operators.files(root, [folder])
        for mutant in operators.mutants(path, (root / path).read_bytes())
        if not any(fnmatchcase(f"{mutant.path}::{mutant.function}", pattern) for pattern in left_out)
    ]


def _quotas(sizes: dict[str, int], number: int) -> dict[str, int]:
    """A folder's share goes by the square root of what it has, so that small ones are seen too.

    Example:
        >>> _quotas({"a": 900, "b": 100}, 8)
        {'a': 6, 'b': 2}
    """
    total = sum(math.sqrt(size) for size in sizes.values())
    exact = {folder: number * math.sqrt(size) / total for folder, size in sizes.items()}
    quotas = {folder: int(share) for folder, share in exact.items()}
    for folder in sorted(exact, key=lambda f: quotas[f] - exact[f])[: number - sum(quotas.values())]:
        quotas[folder] += 1
    return quotas


# -- which tests reach what --------------------------------------------------------------------------------------------


def record(files: Sequence[str], records: Records, folder: Path, jobs: int) -> None:
    """Run files of tests, each in a process, and keep what their tests reached."""
    copies = [runs.Copy(ROOT, folder / f"r{i}") for i in range(jobs)]
    for copy in copies:
        places = reach.instrument(copy.folder)
        copy.compile()
    free, ahead, active, began = list(copies), list(files), list[runs.Run](), time.monotonic()
    while ahead or active:
        while ahead and free:
            copy, file = free.pop(), ahead.pop(0)
            active.append(runs.start(_recording(file, len(places)), copy, RECORD_LIMIT_S, file))
        for run in runs.ended(active):
            free.append(run.copy)
            tests = run.report()
            if tests is None:
                print(f"{run.tag}: not recorded\n{run.output.read_text()[-2000:]}")
                continue
            records.add(run.tag, tests, places)
            failed = [name for name, test in tests.items() if not test["passed"]]
            seconds = time.monotonic() - run.began
            told = f"{len(tests)} tests in {seconds:.0f} s" + "".join(f"\n    does not pass: {f}" for f in failed)
            print(f"{time.monotonic() - began:5.0f} s, {len(ahead)} to come: {run.tag}: {told}", flush=True)


def _recording(file: str, size: int) -> Callable[[runs.Copy], Any]:
    def run(copy: runs.Copy) -> Any:
        import pytest

        path = copy.folder / "seen"
        path.write_bytes(bytes(max(size, 1)))
        os.environ["MUTANTS_SEEN"] = str(path)
        with open(path, "r+b") as shared:
            recorder = reach.Recorder(mmap.mmap(shared.fileno(), 0))
        pytest.main([*_quiet(copy, [file]), "-m", "not slow and not hours", "--timeout=240", file], [recorder])
        return recorder.tests

    return run


def _quiet(copy: runs.Copy, files: Iterable[str]) -> list[str]:
    quiet = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:xdist"]
    examples = any(file.startswith("lightning_parallel/") for file in files)
    return [*quiet, f"--basetemp={copy.temporary / 'p'}", *(["--doctest-modules"] if examples else [])]


# -- faults ------------------------------------------------------------------------------------------------------------


def nearest(mutant: Mutant, tests: Sequence[Recorded], budget: float = BUDGET_S) -> list[Recorded]:
    """The tests that reach a fault, those first that take little time and reach little else, within the budget."""
    place: Place = (mutant.path, mutant.function, mutant.statement)
    able = [test for test in tests if place in test.reached]
    if not able and _runs_at_import(mutant):
        able = [test for test in tests if any(path == mutant.path for path, _, _ in test.reached)]
    scores = {id(test): (test.seconds + len(test.reached) / 500) * _nearness(mutant, test) for test in able}
    chosen, spent, of_file, of_function = list[Recorded](), 0.0, defaultdict[str, int](int), defaultdict[str, int](int)
    while able and (spent < budget or len(chosen) < 2):
        best = min(able, key=lambda test: scores[id(test)] * (1 + 0.5 * of_file[test.file]))
        able.remove(best)
        function = best.names[0].partition("[")[0]
        if len(best.names) == 1 and of_function[function] >= VARIANTS * budget / BUDGET_S:
            continue
        of_file[best.file] += 1
        of_function[function] += 1
        if spent + best.seconds <= 2 * budget or not chosen:
            chosen.append(best)
            spent += best.seconds
    return chosen


def _runs_at_import(mutant: Mutant) -> bool:
    return not mutant.function or operators.is_in_a_class(mutant.function)


def _nearness(mutant: Mutant, test: Recorded) -> float:
    """Less for tests that are named after the module or its folder."""
    module, folder = Path(mutant.path).stem, mutant.path.split("/")[1]
    if test.file == mutant.path:
        return 0.1
    words = Path(test.file).stem.split("_")
    return 0.3 if set(module.split("_")) & set(words) else 0.6 if folder in words else 1.0


def run_all(
    pending: Sequence[Mutant], tests: Sequence[Recorded], results: Results, folder: Path, jobs: int, budget: float
) -> None:
    """Run faults, so many at a time, and keep what became of each."""
    free, ahead, active = [runs.Copy(ROOT, folder / f"c{i}") for i in range(jobs)], list(pending), list[runs.Run]()
    for copy in free:
        copy.compile()
    while ahead or active:
        while ahead and free:
            mutant, copy = ahead.pop(0), free.pop()
            chosen = nearest(mutant, tests, budget)
            if not chosen:
                results.add(mutant, killed=False, by="no test reaches it", seconds=0.0, tests=0)
                free.append(copy)
                continue
            source = (ROOT / mutant.path).read_bytes()
            (copy.folder / mutant.path).write_bytes(mutant.apply(source))
            limit = 60 + 6 * sum(test.seconds for test in chosen)
            active.append(runs.start(_running(chosen), copy, limit, (mutant, source, chosen)))
        for run in runs.ended(active):
            mutant, source, chosen = run.tag
            (run.copy.folder / mutant.path).write_bytes(source)
            free.append(run.copy)
            report, seconds = run.report(), time.monotonic() - run.began
            names = sum(len(test.names) for test in chosen)
            killed = report is None or report["failed"] is not None
            by = report["failed"] if report is not None else _without_report(run)
            results.add(mutant, killed=killed, by=by, why=_why(run), seconds=round(seconds, 1), tests=names)
            what = f"killed by {by}" if killed else f"SURVIVED {names} tests"
            print(f"{len(ahead) + len(active)} to come; {seconds:.0f} s; {mutant.key}\n    {what}", flush=True)


def _why(run: runs.Run) -> str:
    """The first error that pytest printed."""
    lines = run.output.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith("E  ")), "")


def _without_report(run: runs.Run) -> str:
    ending = run.output.read_text(errors="replace").strip().splitlines()[-1:]
    return f"the time, or an end without a report: {''.join(ending)}"


def _running(chosen: Sequence[Recorded]) -> Callable[[runs.Copy], Any]:
    names = [name for test in chosen for name in test.names]
    limits = {name: 30 + 6 * test.seconds for test in chosen for name in test.names}

    def run(copy: runs.Copy) -> Any:
        import pytest

        files = list(dict.fromkeys(name.partition("::")[0] for name in names))
        plugin = Chosen(names, limits)
        code = pytest.main([*_quiet(copy, files), "-x", *files], [plugin])
        if plugin.failed is None and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            plugin.failed = f"pytest ended with {code!r}"
        return {"failed": plugin.failed}

    return run


class Chosen:
    """A plugin of pytest: runs tests in an order of ours, and keeps the first that fails."""

    def __init__(self, names: Sequence[str], limits: dict[str, float]) -> None:
        self.order, self.limits = {name: i for i, name in enumerate(names)}, limits
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest

        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])
        for item in items:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "timeout"]
            item.add_marker(pytest.mark.timeout(self.limits[item.nodeid]))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"collection of {report.nodeid}"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


# -- what became of them -----------------------------------------------------------------------------------------------


class Results:
    """Lines of JSON, one a run of a fault; the last of a fault counts."""

    def __init__(self, path: Path) -> None:
        self.path, self._by_key = path, dict[str, Any]()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else []:
            result = json.loads(line)
            self._by_key[result["key"]] = result

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        return self._by_key.get(mutant.key)

    def add(self, mutant: Mutant, **found: Any) -> None:
        result = {**mutant.as_dict(), **found}
        self._by_key[mutant.key] = result
        with open(self.path, "a") as file:
            file.write(json.dumps(result) + "\n")


def _explained() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "explained.toml").read_text())


def tell(drawn: Sequence[Mutant], results: Results) -> int:
    """Print survivors and the share of killed ones by folder; 0 if all is well."""
    reasons: dict[str, str] = _explained()["survivors"]
    found = {mutant: results.of(mutant) for mutant in drawn}
    survivors = [mutant for mutant, result in found.items() if result is not None and not result["killed"]]
    for mutant in survivors:
        print(f"\n{mutant.path}:{mutant.line} {mutant.function} ({mutant.operator}; {found[mutant]['tests']} tests)")
        print(diff(mutant, (ROOT / mutant.path).read_bytes()))
        print(f"key: {mutant.key}\nexplained: {reasons.get(mutant.key, 'NO')}")
    print(f"\n{'folder':12} {'killed':>7} {'of':>5} {'explained':>10}")
    total = [0, 0, 0]
    for folder in [*FOLDERS, "all"]:
        mine = [m for m, r in found.items() if r is not None and folder in (m.path.split("/")[1], "all")]
        lost = [m for m in mine if m in survivors]
        total = [len(mine) - len(lost), len(mine), sum(m.key in reasons for m in lost)]
        print(f"{folder:12} {total[0]:7} {total[1]:5} {total[2]:10}")
    waiting = sum(result is None for result in found.values())
    killed, number, explained = total
    print(f"{killed} of {number} killed; {number - killed - explained} survivors are not explained; {waiting} not run")
    return int(killed < KILLED_SHARE * number or killed + explained < number)


def diff(mutant: Mutant, source: bytes) -> str:
    """The fault as a change of lines."""
    texts = [text.decode().splitlines() for text in (source, mutant.apply(source))]
    lines = list(difflib.unified_diff(*texts, lineterm="", n=2))[3:]
    return "\n".join(f"    {line}" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
