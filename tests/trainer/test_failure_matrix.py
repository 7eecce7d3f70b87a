"""Whatever fails, wherever, under each strategy and start method: the user's own exception, and nothing left behind."""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from tests.harness import free_port, new_children, run_ranks
from tests.trainer.failing import (
    DEEPSPEED,
    PLACES,
    STAGED,
    STRATEGIES,
    Failing,
    Hears,
    Refused,
    Seen,
    fail_and_train,
    train,
)
from tests.trainer.pipelines import WEIGHTS, join_as_torchrun, make_trainer
from tests.trainer.test_environments import join_as_slurm
from tests.trainer.test_launchers import ROOT, script_environment

Case = tuple[str, str, int]  # strategy, place, rank
Told = tuple[list[Seen], dict[str, Any]]  # by one process: of failures, and weights of runs that did not fail
ONE_OF_EACH: list[Case] = [
    ("pipeline", "training_step", 1), ("zero_1", "optimizer_step", 0), ("zero_2", "validation_step", 1),
    ("zero_3", "on_fit_start", 1), ("hybrid", "teardown", 1), ("hybrid_3", "training_step", 0),
    ("tensor", "predict_step", 1), ("server", "collate", 1),
]  # fmt: skip
ALL: list[list[Case]] = [
    [(strategy, place, rank) for place in PLACES] for strategy in (*STRATEGIES, *DEEPSPEED) for rank in (0, 1)
]
BEFORE_GROUPS: list[Case] = [("hybrid_3", "configure_optimizers", 0), ("hybrid", "configure_optimizers", 1)]
MADE = STRATEGIES | DEEPSPEED
NAMES = {"collate": "the data loader", "worker": "the data loader"}


def assert_seen(found: Seen, case: Case) -> None:
    """The class, the text, the note, whom it reached, how long it took, and that nothing is left."""
    strategy, place, rank = case
    assert (found.strategy, found.place) == (strategy, place)
    told = f"{found}\n" + "\n".join(found.notes)
    assert not found.left, told
    assert found.same, told
    assert found.seconds < 30, told
    if place == "worker":  # of which torch makes an error of its own where it cannot make the class again
        assert found.kind == "RuntimeError", told
        assert found.text.endswith("Refused: worker had enough\n"), told
    else:
        assert (found.kind, found.text) == ("Refused", f"{place} had enough"), told
    where = NAMES.get(place, place)
    if strategy in STAGED and place in ("training_step", "validation_step", "predict_step"):
        where = "the forward of micro-batch "
    note = found.notes[-1]
    assert f"rank {rank}" in note.splitlines()[0], told
    assert f"failed in {where}" in note, told
    assert f"(rank {1 - rank} stopped because of it)" in note or strategy == "server", told


def assert_all(found: Sequence[Told], cases: Sequence[Case]) -> None:
    """Of every process."""
    reference = train("auto", 1)
    for seen, weights in found:
        for one, case in zip(seen, cases, strict=True):
            assert_seen(one, case)
        for strategy, ours in weights.items():
            if "" not in ours:  # gathered on rank 0 alone
                for name, value in reference.items():
                    torch.testing.assert_close(ours[name], value, **WEIGHTS, msg=f"{name} under {strategy}")
    assert not any("" in weights for weights in found[0][1].values())


def need(strategy: str) -> None:
    if strategy in DEEPSPEED and find_spec("deepspeed") is None:  # whose import has to be told of the device
        pytest.skip("DeepSpeed is not installed")


@pytest.fixture
def own_folder(monkeypatch, tmp_path_factory):
    """A folder for the temporary files of a run alone; its name is short, since sockets have to fit behind it."""
    tmp_path_factory.getbasetemp()  # pytest's own, which outlives it
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
    tempfile.tempdir = None


def by_launcher(join: Any, cases: Sequence[Case], timeout: float = 55.0) -> list[Told]:
    def run(rank: int, port: int) -> Any:
        join(rank, 2, port)
        return fail_and_train(cases, 2)

    return run_ranks(run, 2, free_port(), group=False, timeout=timeout)


def by_forks(cases: Sequence[Case], start_method: str = "fork") -> list[Told]:
    return [fail_and_train(cases, start_method=start_method)]


def by_script(folder: Path, cases: Sequence[Case], timeout: float = 120.0) -> list[Told]:
    names = ["/".join(map(str, case)) for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.failing", "--into", str(folder), *names],
        cwd=ROOT, env=script_environment(), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(2)]


def test_ranks_of_torchrun(own_folder):
    cases = [*ONE_OF_EACH[:-1], *BEFORE_GROUPS, ONE_OF_EACH[-1]]
    assert_all(by_launcher(join_as_torchrun, cases), cases)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: "-".join(map(str, case)))
def test_forked_ranks(case: Case, own_folder):
    assert_all(by_forks([case]), [case])
    assert not new_children()


@pytest.mark.timeout(130)
def test_scripts(own_folder, tmp_path):
    assert_all(by_script(tmp_path, ONE_OF_EACH), ONE_OF_EACH)


@pytest.mark.timeout(130)
@pytest.mark.parametrize("case", [ONE_OF_EACH[4], *(pytest.param(c, marks=pytest.mark.slow) for c in ONE_OF_EACH[:4])])
def test_spawned_ranks(case: Case, own_folder):
    assert_all(by_forks([case], "spawn"), [case])
    assert not new_children()


HOW: dict[str, Callable[[Path, list[Case]], list[Told]]] = {
    "torchrun": lambda folder, cases: by_launcher(join_as_torchrun, cases, 280.0),
    "slurm": lambda folder, cases: by_launcher(join_as_slurm, cases, 280.0),
    "fork": lambda folder, cases: by_forks(cases),
    "popen": lambda folder, cases: by_script(folder, cases, 280.0),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cases", ALL, ids=lambda cases: f"{cases[0][0]}-{cases[0][2]}")
@pytest.mark.parametrize("how", HOW)
def test_everywhere(how: str, cases: list[Case], own_folder, tmp_path):
    need(cases[0][0])
    assert_all(HOW[how](tmp_path, cases), cases)
    assert not new_children()


class Late(Callback):
    """Fails when it hears of a failure."""

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        raise LookupError("late")


ALONE: list[Any] = [  # that run on one rank
    *(name for name in STRATEGIES if not name.startswith(("hybrid", "tensor"))),
    *(pytest.param(name, marks=pytest.mark.slow) for name in DEEPSPEED),
]


@pytest.mark.parametrize("strategy", ALONE)
def test_in_one_process_it_is_the_users_own_object(strategy: str, own_folder):
    need(strategy)
    own = Refused("training_step", 7)

    class Raises(Failing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise own
            return super().training_step(batch, batch_idx)

    options = {"start_method": "popen"} if strategy != "server" else {}
    hears = Hears()
    with pytest.raises(Refused) as caught:
        make_trainer(MADE[strategy](**options), 1, [hears]).fit(Raises())
    if strategy == "server":  # its worker is a process of its own
        assert caught.value.code == 7
    else:
        assert caught.value is own
    assert hears.heard == [caught.value]
    assert "rank 0" in caught.value.__notes__[-1].splitlines()[0]
    assert not dist.is_initialized()


@pytest.mark.parametrize("strategy", ALONE)
def test_a_hook_behind_the_strategys_teardown_that_fails_is_not_hidden(strategy: str, own_folder):
    """Lightning tears a strategy down, calls the last hooks, and tears it down again where one of them raises."""
    need(strategy)
    options = {"start_method": "popen"} if strategy != "server" else {}
    with pytest.raises(Refused, match="teardown had enough"):
        make_trainer(MADE[strategy](**options), 1, []).fit(Failing("teardown", 0))
    assert not dist.is_initialized()


@pytest.mark.parametrize("strategy", ALONE)
def test_a_callback_that_fails_when_it_hears_of_it_leaves_nothing_either(strategy: str, own_folder):
    need(strategy)
    options = {"start_method": "popen"}
    callbacks = [Late(), Hears()]
    with pytest.raises(LookupError, match="late") as caught:
        make_trainer(MADE[strategy](**options), 1, callbacks).fit(Failing("training_step", 0))
    assert isinstance(caught.value.__context__, Refused)
    assert not dist.is_initialized()
    assert not [name for callback in callbacks for name in vars(callback) if name.startswith("on_")]
    assert not new_children()
    reference, ours = train("auto", 1), train(strategy, 1, **options)
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, **WEIGHTS)
