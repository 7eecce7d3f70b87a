"""Failures of whole Trainer runs under every start method: bounded, nobody left behind, the user's exception last."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping

from lightning_parallel.errors import StageError
from tests.harness import new_children
from tests.trainer.watched import Fails, FailsAtEnd, WatchedStrategy, make_trainer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def fit(module: Fails, start_method: str = "fork", **kwargs) -> Trainer:
    trainer = make_trainer(WatchedStrategy(start_method), **kwargs)
    trainer.fit(module)
    return trainer


def failure_of(module: Fails, kind: type[BaseException] = StageError, **kwargs) -> BaseException:
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        fit(module, **kwargs)
    assert type(caught.value) is kind
    assert time.monotonic() - started < 15.0
    assert not new_children()
    return caught.value


@pytest.mark.parametrize("where", ["training_step", "on_train_epoch_start", "configure_optimizers"])
def test_the_users_exception_comes_back_from_forked_ranks(where: str):
    error = failure_of(Fails(where), KeyError)
    assert error.args == (f"the user's own {where}",)
    trace, note = error.__notes__
    assert f'self.maybe("{where}")' in trace
    assert note.startswith(f"rank 1 failed in {where}")
    assert note.endswith("\n(rank 0 stopped because of it)")


def test_a_loader_is_named():
    error = failure_of(Fails(bad_row=5), OSError)
    assert error.__notes__[-1].startswith("rank 1 failed in the data loader (epoch 0, batch ")


def test_a_callback_is_caught_too():
    error = failure_of(Fails(), ZeroDivisionError, callbacks=[FailsAtEnd()])
    assert str(error) == "in a callback"
    assert error.__notes__[-1].startswith("rank 1 failed in on_train_end\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_forked_rank_is_named_with_its_signal(rank: int):
    error = failure_of(Fails("training_step", rank, "SIGKILL"))
    assert str(error) == (
        f"lost rank {rank}: its process ended (SIGKILL: the out-of-memory killer?)\n"
        f"(rank {1 - rank} stopped because of it)"
    )


def test_a_stopped_forked_rank_is_lost_and_ended():
    assert "lost rank 1: not heard of for 3 s" in str(failure_of(Fails("training_step", 1, "SIGSTOP")))


def test_an_interrupt_of_one_rank_ends_all():
    assert "rank 1 failed in training_step (epoch 0, batch 2): KeyboardInterrupt" in str(
        failure_of(Fails("training_step", 1, "interrupt"))
    )


def test_a_mistake_before_the_ranks_are_connected_stays_itself():
    class Picky(Fails):
        def prepare_data(self) -> None:
            raise TypeError("before the ranks")

    with pytest.raises(TypeError, match=r"before the ranks(.|\n)*rank . failed in prepare_data"):
        fit(Picky())
    assert not new_children()


class Counts(Callback):
    """Has a state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args) -> None:
        self.batches += 1

    def state_dict(self) -> dict:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict) -> None:
        self.batches = state["batches"]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_results_come_back_to_the_parent(start_method: str):
    module, counts = Fails(), Counts()
    before, port = module.layer.weight.detach().clone(), os.environ.get("MASTER_PORT")
    stopping = EarlyStopping("loss", check_on_train_epoch_end=True)
    trainer = fit(module, start_method, callbacks=[counts, stopping])
    assert not torch.equal(module.layer.weight, before)
    assert counts.batches == 4
    assert trainer.callback_metrics["loss"] == stopping.best_score
    assert trainer.state.finished
    assert (trainer.global_step, trainer.current_epoch) == (4, 1)
    assert trainer.logged_metrics["loss"] == stopping.best_score
    assert os.environ.get("MASTER_PORT") == port
    assert not new_children()
    with pytest.raises(NotImplementedError, match=r"trainer.fit\(\) was called twice .* fit\(ckpt_path=...\)"):
        trainer.fit(module)


# -- scripts: start_method="popen" -------------------------------------------------------------------------------------


def run_script(*options: str) -> tuple[subprocess.CompletedProcess, float]:
    """What became of a script, and how many seconds after the failure everything had ended."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.watched", *options],
        cwd=ROOT, env=script_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    ended = time.monotonic()
    failed = re.search(r"failing at (\S+)", done.stdout)
    return done, ended - float(failed[1]) if failed else math.inf


def script_environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE")
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def last_line(text: str) -> str:
    """Without the "[rank0]: " that torch writes before the lines of an exception."""
    return [line for line in text.splitlines() if line.strip()][-1].split("]: ")[-1]


@pytest.mark.slow
def test_a_script_trains_on_both_ranks():
    done, _ = run_script("--agrees")
    assert done.returncode == 0, done.stderr
    assert {"rank 0 has trained", "rank 1 has trained"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_script_ends_with_the_users_exception(rank: int):
    done, seconds = run_script("--where", "training_step", "--rank", str(rank))
    assert done.returncode != 0
    assert last_line(done.stderr) == f"(rank {1 - rank} stopped because of it)"
    assert 'KeyError: "the user\'s own training_step"' in done.stderr
    assert f"rank {rank} failed in training_step (epoch 0, batch 2)\n" in done.stderr
    assert seconds < 30


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param("raise", "rank 1 failed in teardown\n", marks=pytest.mark.slow),
        pytest.param(
            *("SIGKILL", "StageError: lost rank 1: its process ended (SIGKILL: the out-of-memory killer?)"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_whose_last_hook_fails_on_another_rank_has_failed(how: str, told: str):
    """Rank 0 has trained and closed its groups by then; it does not leave before the others' hooks are over."""
    done, seconds = run_script("--where", "teardown", "--how", how)
    assert done.returncode == 1
    assert told in done.stderr
    assert "rank 0 has trained" not in done.stdout
    assert seconds < 30


@pytest.mark.slow
def test_a_script_says_by_which_signal_a_rank_ended():
    done, _ = run_script("--where", "training_step", "--how", "SIGKILL")
    assert "StageError: lost rank 1: its process ended (SIGKILL: the out-of-memory killer?)" in done.stderr
    assert last_line(done.stderr) == "(rank 0 stopped because of it)"


@pytest.mark.slow
def test_a_script_whose_rank_0_is_killed_leaves_nobody():
    done, _ = run_script("--where", "training_step", "--how", "SIGKILL", "--rank", "0")
    # Its output is closed only when the last process that writes to it has ended, which run_script waits for.
    assert "StageError: lost rank 0: its process ended (killed, or out of memory)" in done.stderr


@pytest.mark.slow
def test_a_script_that_fails_before_the_ranks_are_connected_ends_with_that():
    done, seconds = run_script("--where", "import")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_installed'" in done.stderr
    expected = "StageError: lost rank 1: its script ended (exit code 1) before it joined trainer.fit; its own error"
    assert last_line(done.stderr) == f"{expected} stands above"
    assert seconds < 30


@pytest.mark.slow
def test_a_script_that_leaves_early_is_told_of():
    done, _ = run_script("--where", "early")
    assert "lost rank 1: its script ended (exit code 0) before it joined trainer.fit; every rank has to" in done.stderr


@pytest.mark.slow
def test_a_stuck_rank_does_not_outlive_the_failure_of_another():
    done, seconds = run_script("--where", "training_step", "--how", "SIGSTOP")
    assert "lost rank 1: not heard of for 3 s" in done.stderr
    assert seconds < 30
