"""States divided within groups of neighbours and held alike by every group, by both engines that do so."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel import cli
from lightning_parallel.measure.memory_reading import STATES
from lightning_parallel.zero.accounting import bytes_by_kind
from tests.trainer.test_zero import ROUNDED, LogsUnderSgd
from tests.trainer.test_zero_checkpoints import Small, assert_like, run, saves
from tests.trainer.test_zero_measured import MIXED, MODELS, ONE_COPY
from tests.trainer.test_zero_measured import run as measured_run
from tests.trainer.zeros import Fit, Result, ddp, fit, on_ranks, zero

PAIRS = {"native": zero(2, shard_size=2), "fsdp2": zero(3, shard_size=2)}


def test_different_rows_as_under_ddp():
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    job = Fit(LogsUnderSgd, options)
    theirs, *ours = on_ranks([(job, ddp()), *((job, make) for make in PAIRS.values())], 4)
    for results in ours:
        for mine, other in zip(results, theirs, strict=True):
            torch.testing.assert_close(mine.losses, other.losses, **ROUNDED)
            torch.testing.assert_close(mine.metrics, other.metrics, **ROUNDED)
        torch.testing.assert_close(results[0].weights, theirs[0].weights, **ROUNDED)


@pytest.fixture(scope="module")
def uninterrupted() -> Result:
    return fit(run(4), "auto", 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", PAIRS)
def test_checkpoints_for_other_groups_and_for_none(tmp_path: Path, uninterrupted: Result, engine: str):
    """A file and a folder of pairs go on in groups of one and of four, under DDP and in one process."""
    file, folder = tmp_path / "file.ckpt", tmp_path / "folder"
    stage = 3 if engine == "fsdp2" else 2
    jobs: list[Any] = [(run(2, saves(file)), PAIRS[engine])]
    jobs.append((run(2, saves(folder)), zero(stage, shard_size=2, state_dict_type="sharded")))
    first, of_folder = on_ranks(jobs, 4)
    assert first[0].optimizers[0]["state"].keys() == uninterrupted.optimizers[0]["state"].keys()
    shares = [set(result.weights) for result in of_folder]
    assert sum(map(len, shares)) == len(set().union(*shares)) == len(uninterrupted.weights)
    jobs = [(run(4, resume=path), zero(stage, shard_size=size)) for path, size in ((file, 1), (folder, 4), (file, 2))]
    jobs.append((run(4, resume=file), ddp(find_unused_parameters=True)))
    *resumed, plain = on_ranks(jobs, 4)
    for results in resumed:
        assert_like(results, uninterrupted, slice(2, None))
    torch.testing.assert_close(plain[0].weights, uninterrupted.weights, **ROUNDED)
    assert cli.main(["consolidate", str(folder), str(tmp_path / "one.ckpt"), "--trusted"]) == 0
    assert_like([fit(run(4, resume=tmp_path / "one.ckpt"), "auto", 1)], uninterrupted, slice(2, None))


@pytest.mark.slow
def test_copies_of_32_bits_are_told_once(tmp_path: Path):
    half: dict[str, Any] = {"precision": "bf16-true", "make": Small}
    path = tmp_path / "half.ckpt"
    jobs = [(run(4, **half), zero(3, shard_size=2)), (run(2, saves(path), **half), zero(3, shard_size=2))]
    whole, _ = on_ranks(jobs, 4)
    [resumed] = on_ranks([(run(4, resume=path, **half), zero(3, shard_size=1))], 4)
    assert all(torch.equal(resumed[0].weights[name], value) for name, value in whole[0].weights.items())


@pytest.mark.parametrize("engine", [pytest.param("native", marks=pytest.mark.slow), "fsdp2"])
def test_bytes_are_those_of_the_groups_size(engine: str):
    """16P/2, 3P within pairs, and an all-reduce of a rank's part (P/2) between them."""
    [results] = on_ranks([(measured_run(*MODELS["even"]), PAIRS[engine])], 4)
    values, _, _, parameters = results[0].extra
    stage, of = (3, ONE_COPY) if engine == "fsdp2" else (2, MIXED)
    formula = bytes_by_kind(stage, 2, of)
    for kind in STATES:
        assert values[f"parallel/memory_{kind}_formula"] == float(parameters * formula[kind]), kind
        for rank in range(4):
            held = values[f"parallel/memory_{kind}/rank_{rank}"]
            assert held == values[f"parallel/memory_{kind}_expected/rank_{rank}"], (kind, rank)
    moved = (3 if stage == 3 else 2) * 2 * parameters
    assert values["parallel/communication_moved"] == values["parallel/communication_moved_formula"] == moved
    between = {k: v for k, v in values.items() if k.startswith("parallel/communication_bytes/replicas")}
    assert between == {"parallel/communication_bytes/replicas/all_reduce/backward": 2 * parameters / 2}
