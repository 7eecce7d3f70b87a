"""What `OnExceptionCheckpoint` and `save_on_exception=True` save: the state behind the last whole step."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.harness import free_port, run_ranks
from tests.trainer.failing import STRATEGIES, Failing, Refused
from tests.trainer.pipelines import WEIGHTS, assert_same_optimizer, join_as_torchrun, make_trainer

WHOLE = [name for name in STRATEGIES if name != "server"]


def fail(folder: Path, strategy: str, place: str, rank: int, devices: int = 2, **options: Any) -> list[str]:
    """A run of this process that fails in its second batch; what it was warned of."""
    torch.manual_seed(1)
    callbacks = [
        OnExceptionCheckpoint(folder, f"{strategy}-{place}"),
        ModelCheckpoint(folder / f"{strategy}-{place}", save_on_exception=True, save_top_k=-1),
    ]
    made = "auto" if strategy == "auto" else STRATEGIES[strategy](**options)
    trainer = make_trainer(
        made, 1 if strategy == "auto" else devices, callbacks, enable_checkpointing=True, use_distributed_sampler=False
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(Refused):
            trainer.fit(Failing(place, rank))
    return [str(warning.message) for warning in told if "is not saved" in str(warning.message)]


def on_ranks(folder: Path, cases: list[tuple[str, str, int]]) -> list[list[list[str]]]:
    def run(rank: int, port: int) -> list[list[str]]:
        join_as_torchrun(rank, 2, port)
        return [fail(folder, *case) for case in cases]

    return run_ranks(run, 2, free_port(), group=False)


def assert_saved(folder: Path, reference: Path, strategy: str, place: str) -> None:
    """One process's state behind its first step, in both files; and that training goes on from it."""
    theirs = torch.load(reference, weights_only=False)
    assert theirs["global_step"] == 1
    files = [folder / f"{strategy}-{place}.ckpt", *(folder / f"{strategy}-{place}").iterdir()]
    assert len(files) == 2
    for file in files:
        ours = torch.load(file, weights_only=False)
        assert (ours["global_step"], ours["epoch"]) == (1, 0)
        assert ours["state_dict"].keys() == theirs["state_dict"].keys()
        for name, value in theirs["state_dict"].items():
            torch.testing.assert_close(ours["state_dict"][name], value, **WEIGHTS)
        assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0], WEIGHTS)
    module = Failing()
    trainer = make_trainer("auto", 1, use_distributed_sampler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of callbacks that are not there, and of a loader that begins anew
        trainer.fit(module, ckpt_path=files[0])
    assert trainer.global_step == 3


def test_a_failed_step_leaves_the_state_of_the_one_before(tmp_path):
    fail(tmp_path, "auto", "training_step", 0)
    told = on_ranks(tmp_path, [(strategy, "training_step", 1) for strategy in WHOLE])
    assert told == [[[]] * len(WHOLE)] * 2
    for strategy in WHOLE:
        assert_saved(tmp_path, tmp_path / "auto-training_step.ckpt", strategy, "training_step")


@pytest.mark.parametrize("strategy", ["hybrid_3", *(pytest.param(n, marks=pytest.mark.slow) for n in WHOLE[:4])])
def test_forked_ranks_save_and_their_parent_leaves_the_file_alone(strategy, tmp_path):
    fail(tmp_path, "auto", "training_step", 0)
    assert fail(tmp_path, strategy, "training_step", 1, start_method="fork") == []
    assert_saved(tmp_path, tmp_path / "auto-training_step.ckpt", strategy, "training_step")


CANNOT = {
    (
        "pipeline",
        "on_before_optimizer_step",
    ): "ranks have made different numbers of the optimizer's steps (rank 0 1, rank 1 0)",
    ("zero_2", "on_before_optimizer_step"): "failed within the optimizer's step, and its state is of no whole one",
    ("server", "training_step"): "the servers of ParameterServerStrategy end with a run that fails",
}


@pytest.mark.slow  # ranks that cannot come are awaited
def test_what_is_of_no_whole_step_is_not_saved_and_said(tmp_path):
    told = on_ranks(tmp_path, [(strategy, place, 1) for strategy, place in CANNOT])
    for words, of_case in zip(CANNOT.values(), zip(*told, strict=True), strict=True):
        said = [text for of_rank in of_case for text in of_rank]
        assert any(words in text for text in said), said
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".ckpt")]


def test_several_workers_of_servers_are_told_at_the_start_what_saves_and_that_does(tmp_path):
    """The servers end with the failure; what was written behind the step before is one process's."""
    fail(tmp_path, "auto", "training_step", 0)
    often = ModelCheckpoint(tmp_path / "often", "{step}", every_n_train_steps=1, save_top_k=-1)

    def run(rank: int, port: int) -> list[str]:
        join_as_torchrun(rank, 2, port)
        torch.manual_seed(1)
        callbacks = [OnExceptionCheckpoint(tmp_path, "none"), often]
        trainer = make_trainer(
            STRATEGIES["server"](), 2, callbacks, enable_checkpointing=True, use_distributed_sampler=False
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.raises(Refused):
                trainer.fit(Failing("training_step", 1))
        texts = [str(warning.message) for warning in told]
        return [text for text in texts if "will save nothing" in text or "is not saved" in text]

    told = run_ranks(run, 2, free_port(), group=False)
    start, end = told[0]
    assert start.startswith("OnExceptionCheckpoint will save nothing if this run fails: the servers of")
    assert "Use ModelCheckpoint(every_n_train_steps=...)" in start and "ZeROStrategy(stage=1)" in start
    assert "none.ckpt is not saved: the servers of" in end
    assert not told[1]
    theirs = torch.load(tmp_path / "auto-training_step.ckpt", weights_only=False)
    ours = torch.load(tmp_path / "often" / "step=1.ckpt", weights_only=False)
    assert ours["global_step"] == theirs["global_step"] == 1
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, **WEIGHTS)
    assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0], WEIGHTS)
    assert not (tmp_path / "none.ckpt").exists()


class Dies(Failing):
    """One rank is killed in the second batch."""

    def maybe(self, place: str, when: bool = True) -> None:
        if place == self.place and self.trainer.global_rank == self.rank and when:
            os.kill(os.getpid(), 9)


def test_a_rank_that_is_gone_has_taken_its_state_along(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.trainer.test_saved_on_exception.Failing", Dies)
    monkeypatch.setattr("tests.trainer.test_saved_on_exception.Refused", Exception)
    fail(tmp_path, "pipeline", "training_step", 1, start_method="fork")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".ckpt")]


@pytest.mark.parametrize("strategy", ["pipeline", "zero_1", "zero_3", "server"])
@pytest.mark.parametrize("place", ["training_step", "on_before_optimizer_step"])
def test_in_one_process_it_is_saved_wherever_it_fails(strategy: str, place: str, tmp_path):
    fail(tmp_path, "auto", place, 0)
    start_method = "fork" if (strategy, place) == ("server", "training_step") else "popen"
    assert fail(tmp_path, strategy, place, 0, devices=1, start_method=start_method) == []
    theirs, ours = [torch.load(tmp_path / f"{name}-{place}.ckpt", weights_only=False) for name in ("auto", strategy)]
    assert ours["global_step"] == theirs["global_step"]
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, **WEIGHTS)
    assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0], WEIGHTS)
