"""Scenarios: what a user does with a Trainer, run under a strategy and in one process, and compared.

A scenario is a function of a ``Run``. It asks ``run.trainer(...)`` for Trainers, does with them what it likes and
returns whatever shall be equal to one process on every rank (``OnRankZero`` for what only rank 0 has). Beside that,
every fit of every scenario is held to ``assert_same``: losses, what was logged after every step, weights, optimizer
state. All scenarios of a file run in one launch of ranks, one after the other.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from tests.harness import free_port, run_ranks
from tests.trainer.conformance.strategies import STRATEGIES, Entry
from tests.trainer.pipelines import (
    LOSS,
    WEIGHTS,
    Record,
    Recorder,
    all_metrics,
    assert_same,
    make_trainer,
)
from tests.trainer.pipelines import join_as_torchrun as join

Scenario = Callable[["Run"], Any]
Outcome = tuple[Any, list[Record]]


@dataclass(frozen=True)
class OnRankZero:
    """A result that one process has and of the ranks only rank 0."""

    value: Any


@dataclass
class Run:
    """What a scenario is given.

    Args:
        strategy: makes the strategy, or "auto".
        devices: number of processes.
        folder: a folder that the ranks share, and one process does not.
        options: of every Trainer, where a scenario does not say otherwise.
    """

    strategy: Callable[[], Any]
    devices: int
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    made: list[tuple[Trainer, Record]] = field(default_factory=list)

    def trainer(self, *callbacks: Callback, **options: Any) -> Trainer:
        """A quiet Trainer of three steps; its record is compared when the scenario is over."""
        recorder = Recorder()
        options = {"default_root_dir": self.folder, **self.options, **options}
        trainer = make_trainer(self.strategy(), self.devices, [*callbacks, recorder], **options)
        self.made.append((trainer, recorder.record))
        return trainer

    def records(self) -> list[Record]:
        for trainer, record in self.made:
            record.final = all_metrics(trainer)
        return [record for _, record in self.made]


class Memory(Logger):
    """A logger that keeps what it is given; Lightning calls it on rank 0."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.parameters: dict[str, Any] = {}

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, metrics))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters = dict(params)


def whole_batches(scenario: Scenario) -> Scenario:
    """Mark a scenario in which a step has to see its batch whole."""
    scenario.whole_batches = True  # type: ignore[attr-defined]
    return scenario


def within(tolerance: Mapping[str, float]) -> Callable[[Scenario], Scenario]:
    """Mark a scenario that is compared with another tolerance."""

    def mark(scenario: Scenario) -> Scenario:
        scenario.tolerance = tolerance  # type: ignore[attr-defined]
        return scenario

    return mark


def core(scenario: Scenario) -> Scenario:
    """Mark a scenario that every entry of the table runs."""
    scenario.core = True  # type: ignore[attr-defined]
    return scenario


class Suite:
    """Scenarios that share a launch: it runs when the first of them is asked for, once for each strategy."""

    def __init__(self, *scenarios: Scenario) -> None:
        self.scenarios = scenarios
        self._outcomes: dict[str, Any] = {}

    def of(self, entry: Entry) -> list[Scenario]:
        wanted = [scenario for scenario in self.scenarios if hasattr(scenario, "core") or not entry.core]
        return [scenario for scenario in wanted if scenario.__name__ not in entry.without]

    def for_each_strategy(self, test: Callable[..., None]) -> Any:
        """Parametrize a test by ``entry`` and ``scenario``."""
        pairs = [entry.case(scenario, id=scenario.__name__) for entry in STRATEGIES for scenario in self.of(entry)]
        return pytest.mark.parametrize(("entry", "scenario"), pairs)(test)

    def check(self, entry: Entry, scenario: Scenario, folder: Path) -> None:
        """Every rank returned what one process returns, and every fit was that of one process."""
        name = str(entry)
        if name not in self._outcomes:
            try:
                self._outcomes[name] = run_scenarios(self.of(entry), entry, folder)
            except BaseException as error:
                self._outcomes[name] = error
        if isinstance(self._outcomes[name], BaseException):
            raise self._outcomes[name]
        assert_as_in_one_process(scenario, self._outcomes[name][scenario.__name__], folder / "one")


def run_scenarios(scenarios: Sequence[Scenario], entry: Entry, folder: Path) -> dict[str, list[Outcome]]:
    """Run scenarios one after the other on the ranks of one launch."""

    def on_rank(rank: int, port: int) -> list[Outcome]:
        join(rank, entry.ranks, port)
        warnings.filterwarnings("ignore", message=entry.advice)
        return [_run(scenario, entry, folder) for scenario in scenarios]

    results = run_ranks(on_rank, entry.ranks, free_port(), group=False, timeout=entry.timeout)
    return {
        scenario.__name__: list(ranks) for scenario, ranks in zip(scenarios, zip(*results, strict=True), strict=True)
    }


def _run(scenario: Scenario, entry: Entry | None, folder: Path) -> Outcome:
    make = (lambda: "auto") if entry is None else lambda: entry.make(getattr(scenario, "whole_batches", False))
    ranks, options = (1, {}) if entry is None else (entry.ranks, entry.trainer)
    run = Run(make, ranks, folder / scenario.__name__, options)
    run.folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    try:
        return scenario(run), run.records()
    except BaseException as error:
        error.__notes__ = [*getattr(error, "__notes__", []), f"in scenario {scenario.__name__}"]  # type: ignore[attr-defined]
        raise


def assert_as_in_one_process(scenario: Scenario, outcomes: Sequence[Outcome], folder: Path) -> None:
    """What the ranks returned and recorded, beside the same scenario in one process."""
    folder.mkdir()
    expected, reference = _run(scenario, None, folder)
    tolerance = getattr(scenario, "tolerance", None)
    for rank, (value, _) in enumerate(outcomes):
        assert_alike(value, expected, tolerance or LOSS, f"rank {rank}", rank)
    by_trainer = zip(*(records for _, records in outcomes), strict=True)
    for records, theirs in zip(by_trainer, reference, strict=True):
        if theirs.losses:
            assert_same(records, theirs, tolerance or LOSS, tolerance or WEIGHTS)
        else:
            finals = [record.final for record in records]
            assert_alike(finals, [theirs.final] * len(records), tolerance or LOSS, "metrics")


def assert_alike(ours: Any, theirs: Any, tolerance: Mapping[str, float], where: str, rank: int = 0) -> None:
    """Equal structures; floats and tensors to a tolerance."""
    if isinstance(theirs, OnRankZero):
        if rank == 0:
            assert_alike(ours.value, theirs.value, tolerance, where)
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), f"{where}: {list(ours)}, one process has {list(theirs)}"
        for key, value in theirs.items():
            assert_alike(ours[key], value, tolerance, f"{where}[{key!r}]", rank)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), f"{where}: {ours}, one process has {theirs}"
        for i, value in enumerate(theirs):
            assert_alike(ours[i], value, tolerance, f"{where}[{i}]", rank)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, rel_tol=tolerance["rtol"], abs_tol=tolerance["atol"]), (where, ours, theirs)
    else:
        assert ours == theirs, f"{where}: {ours!r}, one process has {theirs!r}"
