"""Checkpoints of ZeRO are one process's: a plain Trainer goes on from them, and any number of ranks in any stage."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel import cli
from lightning_parallel.strategies import PipelineStrategy
from tests.trainer.modules import Classifier, chain, row_dataset
from tests.trainer.pipelines import LOSS, WEIGHTS, assert_same_optimizer
from tests.trainer.zeros import Fit, Result, fit, on_ranks, zero

ALIKE = {"use_distributed_sampler": False}  # all ranks get all rows, so that any number of them does the same


class Model(Classifier):
    """Frozen and tied layers, buffers, a layer that no batch uses, two groups, a scheduler."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*chain(5), nn.BatchNorm1d(3)))
        self.net[0].requires_grad_(False)
        self.net[4].weight = self.net[2].weight
        self.never = nn.Linear(5, 1)

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Trained(Model):
    """Frozen and tied layers, buffers, two groups, a scheduler; every layer is used."""

    def __init__(self) -> None:
        super().__init__()
        del self.never
        self.net[8] = nn.Linear(6, 3, bias=False)  # before a BatchNorm a bias has a gradient of rounding alone


class WithTests(Trained):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def loader() -> Any:
    return row_dataset(5, 5)  # odd rows, one batch an epoch


def run(epochs: int, after: Any = None, resume: Any = None, make: Any = Model, **options: Any) -> Fit:
    return Fit(make, {"max_epochs": epochs, **ALIKE, **options}, loader, after, resume)


def saves(path: Path) -> Any:
    """Save when `fit` has ended."""

    def save(trainer: Any, module: LightningModule) -> Any:
        trainer.save_checkpoint(path)
        return path.exists()

    return save


def assert_like(results: list[Result], reference: Result, losses: slice = slice(None)) -> None:
    for result in results:
        torch.testing.assert_close(result.losses, reference.losses[losses], **LOSS)
    assert list(results[0].weights) == list(reference.weights)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
    assert_same_optimizer(results[0].optimizers[0], reference.optimizers[0], WEIGHTS)


@pytest.fixture(scope="module")
def uninterrupted() -> Result:
    return fit(run(4), "auto", 1)


@pytest.mark.parametrize(
    ("stage", "engine"),
    [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, None), (2, None), (2, "fsdp2"))), (3, None)],
)
def test_from_two_ranks_to_one_and_to_four(tmp_path: Path, uninterrupted: Result, stage: int, engine: Any):
    path = tmp_path / "two.ckpt"
    first = run(2, saves(path))
    [results] = on_ranks([(first, zero(stage, engine=engine))], 2)
    assert all(result.extra for result in results)
    assert_like([fit(run(4, resume=path), "auto", 1)], uninterrupted, slice(2, None))
    other = 3 if stage < 3 else 1
    resumed = on_ranks([(run(4, resume=path), zero(s)) for s in (stage, other)], 4)
    for results in resumed:
        assert_like(results, uninterrupted, slice(2, None))


@pytest.mark.parametrize("stage", [2, 3])
def test_from_one_process_to_two_ranks(tmp_path: Path, uninterrupted: Result, stage: int):
    fit(run(2, saves(tmp_path / "one.ckpt")), "auto", 1)
    [results] = on_ranks([(run(4, resume=tmp_path / "one.ckpt"), zero(stage))], 2)
    assert_like(results, uninterrupted, slice(2, None))


def evaluates(path: Path) -> Any:
    def test(trainer: Any, module: LightningModule) -> Any:
        trainer.validate(module, loader(), verbose=False)
        trainer.save_checkpoint(path)
        again = torch.load(path, weights_only=False)["state_dict"]
        new = {"weights_only": False} if "weights_only" in signature(trainer.test).parameters else {}  # Lightning 2.6
        [found] = trainer.test(module, loader(), ckpt_path=path, verbose=False, **new)
        return found, {name: value.clone() for name, value in again.items()}

    return test


class WithATest(Model):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


@pytest.mark.parametrize("stage", [2, 3])
def test_saved_after_validate_and_tested(tmp_path: Path, stage: int):
    reference = fit(run(2, evaluates(tmp_path / "one.ckpt"), make=WithATest), "auto", 1)
    [results] = on_ranks([(run(2, evaluates(tmp_path / "two.ckpt"), make=WithATest), zero(stage))], 2)
    for result in results:
        torch.testing.assert_close(result.extra, reference.extra, **LOSS)


# -- 32-bit copies -----------------------------------------------------------------------------------------------------


class Small(Classifier):
    """Steps that 16 bits would not show."""

    def __init__(self) -> None:
        super().__init__(chain(3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("stage", "then"), [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 3), (2, 2))), (3, 2)]
)
def test_copies_of_32_bits_are_resumed(tmp_path: Path, stage: int, then: int):
    """What one process cannot do: its 16-bit weights forget what a step added."""
    half = {"precision": "bf16-true"}
    whole = run(6, make=Small, **half)
    first = run(3, saves(tmp_path / "half.ckpt"), make=Small, **half)
    uninterrupted, _ = on_ranks([(whole, zero(stage)), (first, zero(stage))], 2)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    assert {value.dtype for value in saved["master_weights"].values()} == {torch.float32}
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.bfloat16}
    assert all(torch.equal(saved["master_weights"][n].bfloat16(), value) for n, value in saved["state_dict"].items())
    [results] = on_ranks([(run(6, resume=tmp_path / "half.ckpt", make=Small, **half), zero(then))], 4)
    for name, value in uninterrupted[0].weights.items():
        assert torch.equal(results[0].weights[name], value), name
    loaded = fit(run(4, resume=tmp_path / "half.ckpt", make=Small, **half), "auto", 1)
    assert len(loaded.losses) == 1


def test_another_optimizer_is_refused(tmp_path: Path):
    fit(run(2, saves(tmp_path / "one.ckpt"), make=Small), "auto", 1)
    with pytest.raises(Exception, match=r"The checkpoint's AdamW has parameter groups of sizes \[6\], this run's has"):
        on_ranks([(run(4, resume=tmp_path / "one.ckpt", make=OneLayer), zero(2))], 2)


class OneLayer(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[0].parameters())


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "then"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_sharded_checkpoint_is_resumed_and_consolidated(tmp_path: Path, uninterrupted: Result, stage: int, then: int):
    folder, file = tmp_path / "folder", tmp_path / "file.ckpt"
    [first] = on_ranks([(run(2, saves(folder)), zero(stage, state_dict_type="sharded"))], 2)
    shares = [set(result.weights) for result in first]
    assert not shares[0] & shares[1]
    [results] = on_ranks([(run(4, resume=folder), zero(then))], 2)
    assert_like(results, uninterrupted, slice(2, None))
    assert cli.main(["consolidate", str(folder), str(file), "--trusted"]) == 0
    assert_like([fit(run(4, resume=file), "auto", 1)], uninterrupted, slice(2, None))


@pytest.mark.parametrize("copies", [True, False])
def test_copies_of_32_bits_in_a_sharded_checkpoint(tmp_path: Path, copies: bool):
    """And 16-bit weights where there are none."""
    half, options = {"precision": "bf16-true"}, {"master_weights": copies}
    first = run(2, saves(tmp_path / "folder"), make=Small, **half)
    sharded = [
        (first, zero(2, state_dict_type="sharded", **options)),
        (run(4, make=Small, **half), zero(2, **options)),
    ]
    _, whole = on_ranks(sharded, 2)
    [results] = on_ranks([(run(4, resume=tmp_path / "folder", make=Small, **half), zero(2, **options))], 2)
    assert all(torch.equal(results[0].weights[name], value) for name, value in whole[0].weights.items())


# -- parts within groups, and in the host's memory ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"shard_size": 2}, {"offload": True})),
        {"shard_size": 1, "offload": True},
    ],
)
def test_other_places_for_the_parts(tmp_path: Path, uninterrupted: Result, options: dict[str, Any]):
    path = tmp_path / "four.ckpt"
    [first] = on_ranks([(run(2, saves(path)), zero(2, **options))], 4)
    assert first[0].optimizers[0]["state"].keys() == uninterrupted.optimizers[0]["state"].keys()
    [results] = on_ranks([(run(4, resume=path), zero(1, **options))], 4)
    assert_like(results, uninterrupted, slice(2, None))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shards_gradients_and_states_on_the_host(uninterrupted: Result):
    jobs = [(run(4), zero(stage, engine="fsdp2", offload=True)) for stage in (2, 3)]
    for results in on_ranks(jobs, 2, timeout=110.0):
        assert_like(results, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_goes_on_and_comes_back(tmp_path: Path, stage: int):
    """Two epochs divided, two as a pipeline, two divided again, as six in one process."""
    first, second = tmp_path / "divided.ckpt", tmp_path / "pipeline.ckpt"
    whole = fit(run(6, make=Small), "auto", 1)
    jobs: list[Any] = [(run(2, saves(first), make=Small), zero(stage))]
    jobs.append((run(4, saves(second), first, Small), lambda: PipelineStrategy(num_microbatches=1)))
    jobs.append((run(6, resume=second, make=Small), zero(stage)))
    *_, last = on_ranks(jobs, 2, timeout=110.0)
    assert_like(last, whole, slice(4, None))


def test_groups_that_do_not_divide_the_ranks():
    with pytest.raises(Exception, match=r"shard_size=3\) cannot divide 2 ranks into groups of 3. Use a divisor."):
        on_ranks([(run(1), zero(2, shard_size=3))], 2)
