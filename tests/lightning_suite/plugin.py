"""pytest plugin: where Lightning's own tests would get SingleDeviceStrategy on a CPU, they get a strategy of ours.

`run.py` starts pytest with it, with these variables of the environment:

* SUITE_STRATEGY: ``module:Class``; empty for Lightning as it is. SUITE_OPTIONS: JSON of the class's arguments.
* SUITE_OUT: the file that gets a JSON line for each test: its outcome, and whether it met that place. A test that has a
  line there already is left out, so that files whose process died are continued behind the test that ended it.
* SUITE_ONLY: a file with the ids to run, one a line; empty for all.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

TEXT = 8000  # characters of a failure's text that are kept, from its end: the error is there


def in_its_place(strategy: Callable[[], Any] | None, met: Callable[[], None]) -> None:
    """Trainers that would take SingleDeviceStrategy on a CPU take what `strategy` makes from here on.

    Args:
        strategy: None to leave Lightning's own.
        met: called whenever a Trainer is at that point.
    """
    import lightning.pytorch.trainer.connectors.accelerator_connector as connector
    from lightning.pytorch.strategies import SingleDeviceStrategy

    chosen = connector._AcceleratorConnector._choose_strategy

    def choose(self: Any) -> Any:
        found = chosen(self)
        if type(found) is not SingleDeviceStrategy or found.root_device.type != "cpu":
            return found
        met()
        return found if strategy is None else strategy()

    connector._AcceleratorConnector._choose_strategy = choose


def skip_test(*_: Any, **__: Any) -> None:
    pytest.skip("starts processes of Lightning's own")


def without_processes() -> None:
    """Skip tests where a strategy of Lightning's starts processes: ours have no part in them, and they take longest."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

    for launcher in (_MultiProcessingLauncher, _SubprocessScriptLauncher):
        launcher.launch = skip_test


class Recorder:
    """Writes which test starts, and what became of it, at once: the process may be killed in the next one."""

    def __init__(self, out: TextIO, done: set[str], only: set[str] | None) -> None:
        self.out = out
        self.done = done
        self.only = only
        self.reports: list[pytest.TestReport] = []
        self.has_met = False

    def meet(self) -> None:
        """The test that runs would use SingleDeviceStrategy on a CPU."""
        self.has_met = True

    def write(self, **line: Any) -> None:
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted, others = [], []
        for item in items:
            left_out = item.nodeid in self.done or (self.only is not None and item.nodeid not in self.only)
            (others if left_out else wanted).append(item)
        items[:] = wanted
        config.hook.pytest_deselected(items=others)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(id=report.nodeid, outcome="failed", seconds=0, met=False, text=str(report.longrepr)[-TEXT:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports = []
        self.has_met = False
        self.write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # a flaky test of Lightning's: the next try counts
            self.reports = []
        else:
            self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = {report.outcome for report in self.reports}
        outcome = next((worst for worst in ("failed", "skipped") if worst in outcomes), "passed")
        texts = [f"in {report.when}:\n{report.longrepr}"[-TEXT:] for report in self.reports if report.failed]
        seconds = round(sum(report.duration for report in self.reports), 2)
        self.write(id=nodeid, outcome=outcome, seconds=seconds, met=self.has_met, text="\n".join(texts))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(end=int(exitstatus))


def ours(name: str, options: str) -> Callable[[], Any] | None:
    """What makes the strategy called ``module:Class``, with JSON of its arguments; None for no name."""
    if not name:
        return None
    module, _, attribute = name.partition(":")
    return partial(getattr(importlib.import_module(module), attribute), **json.loads(options or "{}"))


def pytest_configure(config: pytest.Config) -> None:
    path = Path(os.environ["SUITE_OUT"])
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    only = os.environ.get("SUITE_ONLY")
    recorder = Recorder(
        path.open("a"),
        {line["id"] for line in lines if "id" in line},
        set(Path(only).read_text().splitlines()) if only else None,
    )
    recorder.write(begin=os.getpid())
    config.pluginmanager.register(recorder, "lightning_suite_recorder")
    in_its_place(ours(os.environ.get("SUITE_STRATEGY", ""), os.environ.get("SUITE_OPTIONS", "")), recorder.meet)
    without_processes()
