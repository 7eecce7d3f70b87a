"""Committed checkpoints are resumed from as they ever were, and what is written today is what was written then."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel.checkpoint.sharded import consolidate
from tests.nets import saved
from tests.nets.record import is_there
from tests.nets.saved import SAVED, Found, Job

# An older Lightning says so of what a newer one wrote.
pytestmark = pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning")

CHEAP = [name for name, one in SAVED.items() if not one.slow]
# What says who wrote a file and when.
PASSING = ("pytorch-lightning_version",)


def without_passing(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in leaves.items() if not name.endswith(PASSING)}


@cache
def uncut(name: str) -> Found:
    """The run that nobody cut, in one process."""
    return saved.fit(SAVED[name], "auto", 1)


def assert_resumed(name: str, found: Sequence[Found], how: str, path: Path) -> None:
    """It began where the checkpoint was written, and came to what the run without a cut came to."""
    one, first, wanted = SAVED[name], found[0], saved.expected()[name]
    where = f"{name}, resumed {how}"
    assert first.progress == {"step": saved.BEFORE * saved.BATCHES, "epoch": saved.BEFORE}, where
    if path.is_file():
        whole = torch.load(path, weights_only=False)
        weights = whole.get("current_model_state", whole["state_dict"])  # beside an average of them
        then = saved.flat({"state_dict": weights, "optimizer_states": whole["optimizer_states"]})
        for leaf, value in first.begun_with.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    value, then[leaf], rtol=0, atol=0, msg=lambda text, leaf=leaf: f"{where}: {leaf}: {text}"
                )
        assert first.begun_with.keys() == then.keys(), where
    assert len(first.losses) == (saved.AFTER - saved.BEFORE) * saved.BATCHES, where
    if not one.certain:
        return
    torch.testing.assert_close(
        torch.tensor(first.losses), torch.tensor(wanted["losses"]), **one.tolerance, msg=lambda t: f"{where}: {t}"
    )
    weights = saved.whole_shapes(name, saved.whole(found, "weights"))
    for leaf, sums in saved.summed(weights).items():
        if leaf in wanted:
            assert sums == pytest.approx(wanted[leaf], rel=one.tolerance["rtol"], abs=36 * one.tolerance["atol"]), where
    if plain_is_equal(name):
        assert_close(weights, uncut(name).weights, one.tolerance, where)
        assert_close(saved.whole(found, "optimizer"), uncut(name).optimizer, one.tolerance, where)


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: Any, where: str) -> None:
    """Tensors and numbers; of tensors that are cut only what is whole."""
    mine = {leaf: value for leaf, value in ours.items() if isinstance(value, (torch.Tensor, float))}
    mine = {leaf: v for leaf, v in mine.items() if getattr(v, "shape", ()) == getattr(theirs[leaf], "shape", ())}
    assert mine, where
    assert saved.differences(mine, {leaf: theirs[leaf] for leaf in mine}, tolerance) == [], where


def plain_is_equal(name: str) -> bool:
    """Whether one process comes to the same; not so with copies of 32 bits and with filters."""
    return SAVED[name].trainer.get("precision") != "bf16-true" and "filtered" not in name


def assert_written_as_then(name: str, now: Path, then: Path) -> None:
    """The same entries, kinds, shapes and values; no values where workers do not wait for each other."""
    one = SAVED[name]
    ours, theirs = without_passing(saved.read(now)), without_passing(saved.read(then))
    assert saved.differences(ours, theirs, one.tolerance if one.certain else None) == [], name


def assert_all_was_read(name: str, again: Path, then: Path) -> None:
    """A run that is resumed and saves at once writes the bits that it has read."""
    states = ("state_dict", "optimizer", "master", "MixedPrecision", "current_model", "averaging")
    if SAVED[name].callbacks is not saved.swa:  # which makes its schedule of the learning rate in the next epoch
        states = (*states, "lr_schedulers")
    ours, theirs = (
        {leaf: value for leaf, value in saved.read(path).items() if leaf.removeprefix("chunks/").startswith(states)}
        for path in (again, then)
    )
    assert saved.differences(ours, theirs, {"rtol": 0.0, "atol": 0.0}) == [], f"{name}, saved again"


def hold(names: Sequence[str], folder: Path) -> None:
    """Resume from checkpoints of equally many ranks, and write them anew, in one launch; a plain Trainer resumes."""
    paths = {name: saved.unpack(name, folder) for name in names}
    resuming = [Job(name, resume=paths[name], again=folder / f"{name} again") for name in names]
    writing = [Job(name, save=folder / name) for name in names]
    found = saved.launched([*resuming, *writing])
    for name, ranks in zip(names, found, strict=False):
        assert_resumed(name, ranks, "by those who wrote it", paths[name])
        assert_all_was_read(name, folder / f"{name} again", paths[name])
        assert_written_as_then(name, folder / name, paths[name])
    for name in names:
        if SAVED[name].plain:
            plain = saved.fit(SAVED[name], "auto", 1, resume=paths[name])
            assert_resumed(name, [plain], "by one process", paths[name])


def hold_others(name: str, folder: Path) -> None:
    """Other layouts resume from it."""
    path = saved.unpack(name, folder)
    others = [other for other in SAVED[name].others if other != "servers" or is_there("zmq")]
    jobs = [Job(name, resume=path, other=other) for other in others]
    for job, ranks in zip(jobs, saved.launched(jobs) if jobs else [], strict=True):
        assert_resumed(name, ranks, f"by {job.other}", path)


def can_run(name: str) -> bool:
    return SAVED[name].there and is_there(SAVED[name].engine)


def slow(names: Sequence[str]) -> list[Any]:
    """Names of checkpoints, each for a slow test of its own."""
    marks = [pytest.mark.slow, pytest.mark.timeout(120)]
    return [
        pytest.param(
            name, marks=[*marks, pytest.mark.skipif(not can_run(name), reason=SAVED[name].engine or "Lightning")]
        )
        for name in names
    ]


@pytest.mark.timeout(120)
def test_checkpoints_are_resumed_and_written_as_ever(tmp_path):
    hold([name for name in CHEAP if can_run(name)], tmp_path)
    missing = [f"{name} needs {SAVED[name].engine}" for name in CHEAP if not can_run(name)]
    if missing:
        pytest.skip("; ".join(missing))


@pytest.mark.parametrize("name", slow([name for name, one in SAVED.items() if one.slow]))
def test_checkpoint_is_resumed_and_written_as_ever(tmp_path, name):
    hold([name], tmp_path)


@pytest.mark.parametrize("name", slow([name for name, one in SAVED.items() if one.others]))
def test_checkpoint_is_resumed_by_others(tmp_path, name):
    hold_others(name, tmp_path)


@pytest.mark.parametrize("name", ["pipeline_sharded", "hybrid_2x1x1_zero_3_sharded"])
def test_a_committed_folder_is_made_one_file(tmp_path, name):
    """Which a plain Trainer goes on from."""
    path = saved.unpack(name, tmp_path)
    consolidate(path, tmp_path / "one", weights_only=False)
    assert_resumed(name, [saved.fit(SAVED[name], "auto", 1, resume=tmp_path / "one")], "by one process", path)


def test_all_are_there_and_small():
    paths = {path.name for path in saved.FOLDER.glob("*.tar.xz")}
    assert paths == {saved.archive_of(name).name for name in SAVED}
    assert sum(path.stat().st_size for path in saved.FOLDER.iterdir()) < 500_000
