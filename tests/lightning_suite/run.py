"""Runs Lightning's own tests with Lightning's strategy and with ours, and says which differ without a reason.

    python -m tests.lightning_suite.run --source FOLDER [--strategies zero_2 ...]

FOLDER is a checkout of Lightning at tag 2.6.5 (its `tests/tests_pytorch` is read, nothing else). A few files of
tests share a process, each worker's in a copy of the tests of its own, since they look for files that appear beside
them. What has run is not run again: results lie in --out until the code that they come from changes. A process that
says nothing for longer than a test may take is killed with what it started; the test that it was in has failed, and
its files go on behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.lightning_suite.differences import (
    EXPECTED,
    KINDS,
    Result,
    by_headline,
    compare,
    read_list,
    sort_in,
    write_list,
)

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
TAG = "2.6.5"
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("", {}),
    "pipeline": ("lightning_parallel:PipelineStrategy", {"num_microbatches": 1}),
    "zero_2": ("lightning_parallel:ZeROStrategy", {"stage": 2}),
    "hybrid": ("lightning_parallel:HybridStrategy", {}),
    "parameter_server": ("lightning_parallel:ParameterServerStrategy", {"start_method": "popen"}),
}
PATHS = (
    *("loops", "core", "checkpointing", "callbacks", "tuner", "models/test_hooks.py", "models/test_restore.py"),
    *(
        f"trainer/{name}"
        for name in ("optimization", "logging_", "flags", "properties", "test_trainer.py", "test_states.py")
    ),
)
# What these ask of a strategy, the others ask too; legacy checkpoints are files that would have to be fetched; tests of
# the throughput monitor give the whole process a clock that ends after six readings, which our strategies read too.
LEFT_OUT = (
    *("callbacks/progress/", "callbacks/test_pruning.py", "callbacks/test_spike.py"),
    *("test_legacy_checkpoints.py", "callbacks/test_throughput_monitor.py"),
)
NO_SOURCE = f"""Lightning's own tests are not part of this project, nor of Lightning's wheel.
Give a checkout of Lightning at tag {TAG}, got by any means:
    git clone --depth 1 --branch {TAG} https://github.com/Lightning-AI/pytorch-lightning FOLDER
    make test-lightning LIGHTNING_SOURCE=FOLDER"""


class Suite:
    """Lightning's tests as copies in folders of their own, one a worker."""

    def __init__(self, source: Path, out: Path, options: argparse.Namespace) -> None:
        self.source = source
        self.out = out
        self.timeout: int = options.timeout
        self.prefix: list[str] = shlex.split(options.prefix)
        self.workers: int = options.workers
        self.groups = grouped(files_of(source, options.files), source)
        self.running: set[subprocess.Popen[bytes]] = set()

    def tree(self, worker: int) -> Path:
        """The folder in which a worker's tests run; a copy that is there already is used."""
        tree = self.out / f"tree-{worker}" / "tests"
        if not tree.exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(self.source / "tests" / "tests_pytorch", tree / "tests_pytorch", ignore=ignored)
        return tree

    def run(self, name: str, folder: Path, only: Collection[str] | None) -> dict[str, Result]:
        """Run every file under a strategy; results of files that are done already are read.

        Args:
            name: a key of `STRATEGIES`.
            folder: where its results lie.
            only: ids to run; None for all.
        """
        jobs: queue.SimpleQueue[tuple[list[str], Path]] = queue.SimpleQueue()
        asked = {test.partition("::")[0] for test in only} if only is not None else None
        results = [results_of(folder, group) for group in self.groups]
        for group, path in zip(self.groups, results, strict=True):
            if files := [file for file in group if asked is None or file in asked]:
                jobs.put((files, path))
        folder.mkdir(parents=True, exist_ok=True)
        workers = range(self.workers)
        threads = [threading.Thread(target=self._work, args=(n, jobs, name, only), daemon=True) for n in workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # interrupted
            for process in list(self.running):
                kill(process)
        found = {test: result for path in results for test, result in read_results(path).items()}
        if only is None:
            return found
        return {test: found.get(test, Result("failed", "E   The test has not run")) for test in only}

    def _work(self, worker: int, jobs: queue.SimpleQueue[Any], name: str, only: Collection[str] | None) -> None:
        while True:
            try:
                files, results = jobs.get_nowait()
            except queue.Empty:
                return
            since = time.monotonic()
            try:
                if self._group(worker, files, name, results, only):
                    took = time.monotonic() - since
                    print(f"{name}: {len(files)} files in {took:.0f} s, {jobs.qsize()} groups to go", flush=True)
            except Exception as error:
                print(f"{name}: {', '.join(files)} have not run: {error!r}", flush=True)

    def _group(self, worker: int, files: list[str], name: str, results: Path, only: Collection[str] | None) -> bool:
        """Run a group of files to its end, in as many processes as it takes. Returns False if it was done already."""
        lines = drop_half_run(results)
        have = {line.get("id") for line in lines}
        missing = (
            None if only is None else [test for test in only if test.partition("::")[0] in files and test not in have]
        )
        if any("end" in line for line in lines) and not missing:
            return False
        while True:
            code, words = self._process(worker, files, name, results, only)
            last = read_lines(results)[-1:]
            if last and "end" in last[0]:
                return True
            started = last[0].get("start") if last else None
            said = results.with_suffix(".log").read_text()[-2000:]
            text = f"{said}\nE   {words} (code {code})"
            append(results, id=started or files[0], outcome="failed", seconds=0, met=True, text=text)
            if started is None:
                append(results, end=code)
                return True

    def _process(
        self, worker: int, files: list[str], name: str, results: Path, only: Collection[str] | None
    ) -> tuple[int, str]:
        """One process of pytest. Returns its exit status, and how it ended if it did not end well."""
        tree = self.tree(worker)
        command = [sys.executable, "-m", "pytest", "-p", "tests.lightning_suite.plugin", "-p", "no:cacheprovider"]
        command += ["-c", str(HERE / "suite.ini"), "--rootdir", ".", "--timeout", str(self.timeout), "--tb", "short"]
        command += ["-o", "log_level=", "-q", *files]
        strategy, options = STRATEGIES[name]
        with tempfile.TemporaryDirectory(prefix="suite", ignore_cleanup_errors=True) as temporary:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tree), str(PROJECT), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "TMPDIR": temporary,
                "SUITE_STRATEGY": strategy,
                "SUITE_OPTIONS": json.dumps(options),
                "SUITE_OUT": str(results),
                "SUITE_ONLY": "",
            }
            if only is not None:
                environment["SUITE_ONLY"] = str(Path(temporary) / "only")
                Path(environment["SUITE_ONLY"]).write_text("\n".join(only))
            begun = sum("begin" in line for line in read_lines(results))
            with results.with_suffix(".log").open("w") as log:
                process = subprocess.Popen(
                    [*self.prefix, *command],
                    cwd=tree,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.running.add(process)
                try:
                    words = self._wait(process, results, begun)
                finally:
                    kill(process)
                    self.running.discard(process)
        return process.returncode, words

    def _wait(self, process: subprocess.Popen[bytes], results: Path, begun: int) -> str:
        """Wait for a process's end, or kill it once a test has lasted longer than pytest's own timeout would let it."""
        patience = self.timeout + 60
        size, since = -1, time.monotonic()
        while True:
            try:
                process.wait(1)
                return "The test's process ended in the middle of it"
            except subprocess.TimeoutExpired:
                pass
            now = results.stat().st_size if results.exists() else 0
            waits_for_its_turn = bool(self.prefix) and sum("begin" in line for line in read_lines(results)) == begun
            if now != size or waits_for_its_turn:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                return f"The test hung: killed after {patience} s"


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def files_of(source: Path, chosen: Iterable[str] = ()) -> Iterator[str]:
    """Files of tests that apply to a strategy, as pytest names them, the largest first; `chosen`: parts of names."""
    tests = source / "tests"
    found: set[Path] = set()
    for name in PATHS:
        path = tests / "tests_pytorch" / name
        found.update([path] if path.suffix == ".py" else path.rglob("test_*.py"))
    for path in sorted(found, key=lambda path: -path.stat().st_size):
        name = path.relative_to(tests).as_posix()
        if not any(part in name for part in LEFT_OUT) and (not chosen or any(part in name for part in chosen)):
            yield name


def grouped(files: Iterable[str], source: Path, size: int = 64_000) -> list[list[str]]:
    """Files that share a process: starting one takes as long as thirty tests. `size`: bytes of a group, about."""
    groups: list[list[str]] = []
    filled = size
    for file in files:
        if filled >= size:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += (source / "tests" / file).stat().st_size
    return groups


def results_of(folder: Path, group: list[str]) -> Path:
    """Where a group's results lie: it is named after its first file."""
    return folder / (group[0].removeprefix("tests_pytorch/").removesuffix(".py").replace("/", "-") + ".jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of results."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def append(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def drop_half_run(path: Path) -> list[dict[str, Any]]:
    """Forget what was cut off with an earlier runner: a line half written. Returns the lines that stay."""
    lines = read_lines(path)
    if path.exists():
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def read_results(path: Path) -> dict[str, Result]:
    """Results by test."""
    return {
        line["id"]: Result(line["outcome"], line["text"], line["seconds"], line["met"])
        for line in read_lines(path)
        if "id" in line
    }


def fingerprint(suite: Suite, name: str) -> str:
    """What a run's results depend on: versions, Lightning's tests, the strategy's options, and for ours its code."""
    digest = hashlib.sha256(repr((STRATEGIES[name], version("torch"), version("lightning"), sys.version_info)).encode())
    sources = [HERE / "plugin.py", *sorted((suite.source / "tests" / "tests_pytorch").rglob("*.py"))]
    if name != "base":
        sources += sorted((PROJECT / "lightning_parallel").rglob("*.py"))
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def folder_of(suite: Suite, name: str) -> Path:
    """The folder of a run's results, emptied if they come from other code."""
    folder = suite.out / name
    mark = folder / "fingerprint"
    now = fingerprint(suite, name)
    if folder.exists() and (not mark.exists() or mark.read_text() != now):
        print(f"{name}: results of other code are removed", flush=True)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(now)
    return folder


def write_jsonl(path: Path, results: Mapping[str, Result]) -> None:
    lines = [json.dumps({"id": test, **dataclasses.asdict(result)}) + "\n" for test, result in sorted(results.items())]
    path.write_text("".join(lines))


def judge(suite: Suite, name: str, base: dict[str, Result], options: argparse.Namespace) -> tuple[str, bool]:
    """Run a strategy over what passes at base and print what differs. Returns a row of the table, and if it holds."""
    path = EXPECTED / f"{name}.toml"
    groups = read_list(path)
    listed = {test for group in groups for test in group.tests}
    only = [test for test, result in base.items() if result.applies and (not options.listed or test in listed)]
    folder = folder_of(suite, name)
    ours = suite.run(name, folder, only)
    found = compare(base, ours, groups)
    if found.unexplained:  # alone and once more: a loaded machine is no difference
        again = suite.run(name, folder / "again", list(found.unexplained))
        flaky = [test for test, result in again.items() if result.outcome == "passed"]
        ours.update(again)
        found = compare(base, ours, groups)
        for test in flaky:
            print(f"{name}: failed once and passed when it was run again: {test}")
    write_jsonl(suite.out / f"{name}.jsonl", ours)
    if options.update:
        sort_in(groups, found)
        write_list(path, groups)
        found = compare(base, ours, groups)
    for headline, tests in by_headline(found.unexplained).items():
        print(f"\n{name}: {len(tests)} differ without a listed reason: {headline}", *sorted(tests), sep="\n    ")
    if found.agreeing:
        print(f"\n{name}: listed, and no longer different; take them off {path.name} (--update does)", end="")
        print("", *found.agreeing, sep="\n    ")
    if found.strangers and not options.files:
        print(
            f"\n{name}: listed, and do not pass on this machine with Lightning's strategy",
            *found.strangers,
            sep="\n    ",
        )
    counts = [*(found.count(kind) for kind in KINDS), len(found.unexplained), len(found.agreeing)]
    return f"{name:20}{found.passed_at_base:>16}" + "".join(f"{count:>14}" for count in counts), found.holds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [name for name in STRATEGIES if name != "base"]
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite.run", description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="", help=f"a checkout of Lightning at tag {TAG}")
    parser.add_argument("--strategies", nargs="*", default=names, choices=["base", *names], help="all by default")
    parser.add_argument("--out", type=Path, default=PROJECT / "build" / "lightning_suite", help="the folder of results")
    parser.add_argument("--workers", type=int, default=2, help="files at a time")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test may take")
    parser.add_argument("--files", nargs="*", default=[], help="only files whose names contain one of these")
    parser.add_argument(
        "--listed", action="store_true", help="only tests of the expected lists: have they been mended?"
    )
    parser.add_argument(
        "--update", action="store_true", help="bring the lists up to date, by the words of their groups"
    )
    parser.add_argument("--prefix", default="", help="a command before each process, such as `nice`")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every difference is explained, 1 if not, 2 if there is nothing to run."""
    options = parse(arguments)
    source = Path(options.source).resolve()
    if not options.source or not (source / "tests" / "tests_pytorch").is_dir():
        found = (
            f"LIGHTNING_SOURCE={options.source} has no tests/tests_pytorch."
            if options.source
            else "No LIGHTNING_SOURCE."
        )
        print(f"{found} {NO_SOURCE}", file=sys.stderr)
        return 2
    stamp = source / "src" / "version.info"
    if stamp.exists() and stamp.read_text().strip() != TAG:
        print(f"{source} is Lightning {stamp.read_text().strip()}; the lists are for {TAG}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs ends with us
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    suite = Suite(source, out, options)
    base = suite.run("base", folder_of(suite, "base"), None)
    write_jsonl(out / "base.jsonl", base)
    rows = [judge(suite, name, base, options) for name in options.strategies if name != "base"]
    print(
        f"\n{'strategy':20}{'passed at base':>16}", *(f"{title:>13}" for title in (*KINDS, "unexplained", "agree now"))
    )
    for row, _ in rows:
        print(row)
    return 0 if all(holds for _, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
