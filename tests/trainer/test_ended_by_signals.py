"""Ranks that are stopped, launchers that are killed: all end in time, the right rank is named, nothing is left."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.errors import StageError
from lightning_parallel.parameter_server.transport import shared_files
from lightning_parallel.strategies import ParameterServerStrategy
from tests.harness import new_children
from tests.trainer.failing import STRATEGIES, Failing
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer
from tests.trainer.test_sigterm import has_ended
from tests.trainer.watched import QUICK

fork = multiprocessing.get_context("fork")


class Stops(Failing):
    """One rank is stopped in the second batch."""

    def maybe(self, place: str, when: bool = True) -> None:
        if place == self.place and self.trainer.global_rank == self.rank and when:
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("zero_2", 1), *(pytest.param(n, r, marks=pytest.mark.slow) for n in STRATEGIES if n != "server" for r in (0, 1))],
)
def test_the_rank_that_is_stopped_is_named_and_ended(strategy: str, rank: int):
    began = time.monotonic()
    trainer = make_trainer(STRATEGIES[strategy](start_method="fork"), 2, use_distributed_sampler=False)
    with pytest.raises(StageError, match=rf"lost rank {rank}( \(stage .\))?: not heard of for "):
        trainer.fit(Stops("training_step", rank))
    assert time.monotonic() - began < 20
    assert not new_children()


class Endless(Classifier):
    """Tells the process of every rank."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self.said = said

    def on_train_start(self) -> None:
        self.said.send(os.getpid())


def launches(folder: Path, said: Any, make: Any) -> None:
    os.setpgrp()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    trainer = make_trainer(make(), 2, max_epochs=100_000, use_distributed_sampler=False, limit_val_batches=0)
    trainer.fit(Endless(said), row_loader(), row_loader((8,)))


def wait_for(true: Any, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        fork.Event().wait(0.05)
    return bool(true())


def launched(folder: Path, make: Any) -> tuple[Any, list[int]]:
    """A process that forks two ranks, which train for ever; and they."""
    heard, said = fork.Pipe(duplex=False)
    process = fork.Process(target=launches, args=(folder, said, make))
    process.start()
    said.close()
    ranks = []
    while len(ranks) < 2:
        assert heard.poll(30.0), "the ranks do not train"
        ranks.append(heard.recv())
    return process, ranks


def left_in(folder: Path) -> list[str]:
    shared = [name for path in folder.iterdir() if os.path.exists(name := f"/dev/shm/{path.name}")]
    return [str(path) for path in folder.iterdir()] + shared


@pytest.mark.parametrize("how", ["launcher", "all"])
def test_a_launcher_of_servers_that_is_killed_leaves_nothing(how: str, tmp_path, monkeypatch):
    """If nobody of a run is left who could remove its folders, the next one does."""
    process, ranks = launched(tmp_path, ParameterServerStrategy)
    [folder] = tmp_path.glob("server-*")
    assert os.path.exists(f"/dev/shm/{folder.name}")
    os.kill(process.pid, signal.SIGKILL) if how == "launcher" else os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert all(has_ended(rank, within_s=15.0) for rank in ranks)
    if how == "all":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert wait_for(lambda: shared_files.sweep() or not folder.exists())
    assert wait_for(lambda: not folder.exists())
    assert not os.path.exists(f"/dev/shm/{folder.name}")
    assert not left_in(tmp_path)


@pytest.mark.parametrize(
    "strategy", ["pipeline", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero_3", "hybrid"))]
)
def test_a_launcher_of_ranks_that_is_killed_leaves_nothing(strategy: str, tmp_path):
    process, ranks = launched(tmp_path, lambda: STRATEGIES[strategy](start_method="fork"))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert all(has_ended(rank, within_s=15.0) for rank in ranks)
    assert not left_in(tmp_path)


@pytest.mark.parametrize(
    "strategy", ["zero_2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pipeline", "server"))]
)
def test_a_launcher_of_ranks_that_is_stopped_is_ended_with_them(strategy: str, tmp_path, capfd):
    more = {"patience": QUICK} if strategy == "server" else {}
    process, ranks = launched(tmp_path, lambda: STRATEGIES[strategy](start_method="fork", **more))
    os.kill(process.pid, signal.SIGSTOP)
    assert all(has_ended(rank, within_s=25.0) for rank in ranks)
    process.join(5.0)
    assert process.exitcode == -signal.SIGKILL
    assert wait_for(lambda: not left_in(tmp_path))
    assert f"the process that started the ranks ({process.pid}) was stopped (SIGSTOP)" in capfd.readouterr().err


class ToldToEnd(Failing):
    """One rank is told to end, where no batch is to come."""

    def maybe(self, place: str, when: bool = True) -> None:
        if place == self.place and self.trainer.global_rank == self.rank and when:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("strategy", "place", "rank"),
    [
        ("zero_2", "on_train_end", 1),
        *(
            pytest.param(strategy, place, rank, marks=pytest.mark.slow)
            for strategy in ("zero_2", "pipeline", "hybrid")
            for place in ("optimizer_step", "on_train_end")
            for rank in (0, 1)
        ),
    ],
)
def test_a_signal_behind_the_beginning_of_the_last_batch_ends_all_ranks(strategy, place, rank):
    trainer = make_trainer(
        STRATEGIES[strategy](start_method="fork"), 2, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False
    )
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(ToldToEnd(place, rank), row_loader((8, 8)))
    assert caught.value.code == 128 + signal.SIGTERM
    assert f"rank {rank} was told to end (SIGTERM), and all ranks with it" in "".join(caught.value.__notes__)
    assert not new_children()


class ToldBehindTeardown(ToldToEnd):
    """The signal comes when the strategy has been torn down, with the loop that ran."""

    def on_train_end(self) -> None:
        loop = self.trainer.fit_loop
        teardown = loop.teardown

        def told() -> None:
            self.maybe("loop's teardown")
            teardown()

        loop.teardown = told


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("zero_2", 1), *(pytest.param(s, r, marks=pytest.mark.slow) for s in ("zero_2", "pipeline") for r in (0, 1))],
)
def test_a_signal_behind_the_strategy_s_teardown_ends_the_run(strategy, rank):
    trainer = make_trainer(
        STRATEGIES[strategy](start_method="fork"), 2, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False
    )
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(ToldBehindTeardown("loop's teardown", rank), row_loader((8, 8)))
    assert caught.value.code == 128 + signal.SIGTERM
    assert f"rank {rank} was told to end (SIGTERM), and all ranks with it" in "".join(caught.value.__notes__)
    assert not new_children()


def test_folders_of_jobs_that_live_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, lock = shared_files.make_folder()
    shared_files.sweep()
    assert folder.exists()
    os.close(lock)
    shared_files.sweep()
    assert not folder.exists()


def test_a_full_file_system_is_named(tmp_path, monkeypatch, caplog):
    """Weights go through sockets then."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    module, plain = Classifier(), Classifier()
    plain.load_state_dict(module.state_dict())
    options = {"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    make_trainer(ParameterServerStrategy(), 1, **options).fit(module, row_loader(), row_loader((8,)))
    make_trainer("auto", 1, **options).fit(plain, row_loader(), row_loader((8,)))
    for name, value in plain.state_dict().items():
        assert value.equal(module.state_dict()[name]), name
    with pytest.raises(OSError, match=rf"{tmp_path.parent} has no room for 1\.0 MiB of memory shared by processes"):
        shared_files.take_room(0, 0, 1 << 20, tmp_path / "slab")
