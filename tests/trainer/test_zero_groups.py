"""States divided within groups of neighbours and held alike by every group, by every engine."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel import cli
from lightning_parallel.measure.memory_reading import STATES
from lightning_parallel.zero.accounting import bytes_by_kind
from tests.trainer.modules import Classifier
from tests.trainer.test_zero import ROUNDED, LogsUnderSgd, half
from tests.trainer.test_zero_checkpoints import (
    Model,
    Small,
    Trained,
    WithTests,
    assert_like,
    evaluates,
    run,
    saves,
)
from tests.trainer.test_zero_measured import MIXED, MODELS, ONE_COPY, TIED
from tests.trainer.test_zero_measured import run as measured_run
from tests.trainer.zeros import STAGES, Fit, Result, ddp, each_of, fit, on_ranks, others, zero

OWN = [("native", 2), ("fsdp2", 3)]
DEEPSPEED = each_of("deepspeed", STAGES)
SLOW = [pytest.param(*one, marks=pytest.mark.slow, id=one[0]) for one in OWN] + DEEPSPEED


def pairs(engine: str, stage: int, **options: Any) -> Any:
    return zero(stage, engine=engine, **{"shard_size": 2, **options})


@pytest.mark.parametrize(
    "strategies",
    [pytest.param([pairs(*one) for one in OWN], id="own"), others("deepspeed", STAGES, shard_size=2)],
)
def test_different_rows_as_under_ddp(strategies: list[Any]):
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    job = Fit(LogsUnderSgd, options)
    theirs, *ours = on_ranks([(job, ddp()), *((job, make) for make in strategies)], 4, timeout=140.0)
    for results in ours:
        for mine, other in zip(results, theirs, strict=True):
            torch.testing.assert_close(mine.losses, other.losses, **ROUNDED)
            torch.testing.assert_close(mine.metrics, other.metrics, **ROUNDED)
        torch.testing.assert_close(results[0].weights, theirs[0].weights, **ROUNDED)


class Alone(Classifier):
    """Every rank makes parameters of its own."""

    def __init__(self) -> None:
        torch.manual_seed(int(os.environ.get("RANK", 0)))
        super().__init__()


@pytest.mark.parametrize(("engine", "stage"), SLOW)
def test_groups_begin_with_the_first_rank_s_parameters(engine: str, stage: int):
    job = Fit(Alone, {"max_steps": 1, "limit_val_batches": 0})
    theirs, ours = on_ranks([(job, ddp()), (job, pairs(engine, stage))], 4, timeout=140.0)
    torch.testing.assert_close([one.losses for one in ours], [one.losses for one in theirs], **ROUNDED)
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, **ROUNDED)


class OverflowsLast(Classifier):
    """On the last rank alone, and in one batch alone, gradients are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 1 and self.trainer.global_rank == 3 else loss


@pytest.mark.parametrize(("engine", "stage"), SLOW)
def test_an_overflow_in_one_group_is_everybodys(engine: str, stage: int):
    job = Fit(OverflowsLast, {"max_steps": 4, "limit_val_batches": 0, "plugins": half})
    theirs, ours = on_ranks([(job, ddp()), (job, pairs(engine, stage))], 4, timeout=140.0)
    assert all(value.isfinite().all() for value in theirs[0].weights.values())
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, **ROUNDED)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[Any, Result]:
    return {make: fit(run(4, make=make), "auto", 1) for make in (Model, Trained)}


@pytest.mark.parametrize(("engine", "stage"), SLOW)
def test_checkpoints_for_other_groups_and_for_none(
    tmp_path: Path, uninterrupted: dict[Any, Result], engine: str, stage: int
):
    """A file and a folder of pairs go on in groups of one and of four, under DDP and in one process."""
    file, folder = tmp_path / "file.ckpt", tmp_path / "folder"
    make = Trained if engine == "deepspeed" else Model
    reference = uninterrupted[make]
    jobs: list[Any] = [(run(2, saves(file), make=make), pairs(engine, stage))]
    jobs.append((run(2, saves(folder), make=make), pairs(engine, stage, state_dict_type="sharded")))
    first, of_folder = on_ranks(jobs, 4, timeout=70.0)
    assert first[0].optimizers[0]["state"].keys() == reference.optimizers[0]["state"].keys()
    shares = [set(result.weights) for result in of_folder]
    assert sum(map(len, shares)) == len(set().union(*shares)) == len(reference.weights)
    others = ((file, 1), (folder, 4), (file, 2))
    jobs = [(run(4, resume=path, make=make), pairs(engine, stage, shard_size=size)) for path, size in others]
    jobs.append((run(4, resume=file, make=make), ddp(find_unused_parameters=make is Model)))
    *resumed, plain = on_ranks(jobs, 4, timeout=70.0)
    for results in resumed:
        assert_like(results, reference, slice(2, None))
    torch.testing.assert_close(plain[0].weights, reference.weights, **ROUNDED)
    assert cli.main(["consolidate", str(folder), str(tmp_path / "one.ckpt"), "--trusted"]) == 0
    assert_like([fit(run(4, resume=tmp_path / "one.ckpt", make=make), "auto", 1)], reference, slice(2, None))


@pytest.mark.parametrize(("engine", "stage"), SLOW)
def test_evaluations_and_what_is_saved_after_them(tmp_path: Path, engine: str, stage: int):
    reference = fit(run(2, evaluates(tmp_path / "one.ckpt"), make=WithTests), "auto", 1)
    [results] = on_ranks([(run(2, evaluates(tmp_path / "four.ckpt"), make=WithTests), pairs(engine, stage))], 4)
    for result in results:
        torch.testing.assert_close(result.extra, reference.extra, **ROUNDED)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize(("engine", "stage"), SLOW)
def test_copies_of_32_bits_are_told_once(tmp_path: Path, engine: str, stage: int, precision: str):
    half: dict[str, Any] = {"precision": precision, "make": Small}
    path = tmp_path / "half.ckpt"
    jobs = [(run(4, **half), pairs(engine, stage)), (run(2, saves(path), **half), pairs(engine, stage))]
    whole, _ = on_ranks(jobs, 4, timeout=100.0)
    [resumed] = on_ranks([(run(4, resume=path, **half), pairs(engine, stage, shard_size=1))], 4, timeout=100.0)
    assert all(torch.equal(resumed[0].weights[name], value) for name, value in whole[0].weights.items())


@pytest.mark.parametrize(
    ("engine", "stage"), [pytest.param("native", 2, marks=pytest.mark.slow), ("fsdp2", 3), *DEEPSPEED]
)
def test_bytes_are_those_of_the_groups_size(engine: str, stage: int):
    """16P/2, 2P or 3P within pairs, and an all-reduce of a rank's part (P/2) between them."""
    steps = 3 if engine == "deepspeed" else 1  # in its first steps stage 3 gathers more
    [results] = on_ranks([(measured_run(*MODELS["even"], max_steps=steps), pairs(engine, stage))], 4)
    values, _, _, parameters = results[0].extra
    formula = bytes_by_kind(stage, 2, ONE_COPY if engine == "fsdp2" else MIXED)
    for kind in STATES:
        assert values[f"parallel/memory_{kind}_formula"] == float(parameters * formula[kind]), kind
        for rank in range(4):
            held = values[f"parallel/memory_{kind}/rank_{rank}"]
            assert held == values[f"parallel/memory_{kind}_expected/rank_{rank}"], (kind, rank)
    moved = (3 if stage == 3 else 2) * 2 * parameters
    twice = 2 * TIED if (engine, stage) == ("deepspeed", 3) else 0
    assert values["parallel/communication_moved_formula"] == moved
    assert values["parallel/communication_moved"] == moved + twice
    between = {k: v for k, v in values.items() if k.startswith("parallel/communication_bytes/replicas")}
    phase = "step" if engine == "deepspeed" else "backward"
    assert between == {f"parallel/communication_bytes/replicas/all_reduce/{phase}": 2 * parameters / 2}
