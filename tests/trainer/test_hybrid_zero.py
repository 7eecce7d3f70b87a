"""ZeRO inside the data axis of a pipeline: what steps may do there, and what is refused in words."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as of_lightning

from lightning_parallel.errors import StageError
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.strategies import HybridStrategy, ZeROStrategy
from lightning_parallel.zero.sharded_gradient import ShardedGradient
from tests.harness import free_port, run_ranks
from tests.trainer.hybrids import Mesh, assert_one_process, gpt, gpt_case, on_meshes
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import HALF, Case, Record, fit, join_as_torchrun, one_process
from tests.trainer.test_data_axis import Averaged, Conditional, Tied, Twice, assert_all_rows, loader
from tests.trainer.test_parity import LoudInput, half_precision, scale_and_skips, with_sgd
from tests.trainer.test_skip_connections import BLOCKS, UNet
from tests.trainer.watched import QUICK

THREE = {"zero_stage": 3, "bucket_mb": 1e-4}
EACH = {**THREE, "gather": "microbatch"}
TWO = {"zero_stage": 2, "bucket_mb": 1e-4}


def on_mesh(
    *runs: tuple[Case, dict[str, Any]], copies: int = 2, stages: int = 2, timeout: float = 50.0
) -> list[list[Record]]:
    """Runs on so many copies of so many stages, one after the other on the same ranks."""
    size = copies * stages

    def run(rank: int, port: int) -> list[Record]:
        join_as_torchrun(rank, size, port)
        sizes = {"data_parallel_size": copies, "pipeline_parallel_size": stages, "num_microbatches": 2}
        return [fit(case, HybridStrategy(**{**sizes, **options}), size) for case, options in runs]

    results = run_ranks(run, size, free_port(), group=False, timeout=timeout)
    return [list(of_run) for of_run in zip(*results, strict=True)]


def two_epochs(make: Any, copies: int = 2, **trainer: Any) -> Case:
    return Case(make, lambda: loader(4, copies), trainer={"max_epochs": 2, **trainer})


class Straight(UNet, Averaged):
    """Values go from the blocks on the way down to those on the way up."""


NO_VALIDATION = {"limit_val_batches": 0}
RUNS = {
    "evaluations between epochs": (two_epochs(Averaged), THREE),
    "evaluations that gather for every micro-batch": (two_epochs(Averaged), EACH),
    "a step that calls the model twice": (two_epochs(Twice, **NO_VALIDATION), EACH),
    "blocks computed again": (two_epochs(Averaged, **NO_VALIDATION), {**EACH, "recompute": "block"}),
    "stages computed again": (two_epochs(Averaged, **NO_VALIDATION), {**EACH, "recompute": "stage"}),
    "two directions": (two_epochs(Averaged, **NO_VALIDATION), {**TWO, "schedule": "chimera"}),
    "values that go straight": (
        two_epochs(Straight, **NO_VALIDATION),
        {**EACH, "schedule": "interleaved_1f1b", "blocks": BLOCKS, "skip_connections": True},
    ),
    "two directions, stage 3": (two_epochs(Averaged), {**THREE, "schedule": "gems"}),
    "two directions, gathered for every micro-batch": (two_epochs(Averaged), {**EACH, "schedule": "chimera"}),
    "two directions, gathered in I": (
        two_epochs(Averaged, **NO_VALIDATION),
        {**EACH, "schedule": "dualpipe", "num_microbatches": 4},
    ),
}
if hasattr(of_lightning, "EMAWeightAveraging"):  # from version 2.6 on
    AVERAGES = two_epochs(Averaged, callbacks=lambda: [of_lightning.EMAWeightAveraging(decay=0.5)])
    RUNS["averages of weights"] = (AVERAGES.but(at_end=lambda trainer, module: bytes_of_average(trainer)), THREE)
    RUNS["averages, gathered for every micro-batch"] = (AVERAGES, EACH)


SLOW = (  # each has a sibling that is not
    "evaluations between epochs",
    "stages computed again",
    "two directions, stage 3",
    "two directions, gathered in I",
    "averages, gathered for every micro-batch",
)


def bytes_of_average(trainer: Trainer) -> tuple[int, int]:
    """What the average's parameters hold on this rank, and what they would hold whole."""
    average = next(c for c in trainer.callbacks if isinstance(c, of_lightning.EMAWeightAveraging))._average_model
    own = [p for p in average.parameters() if type(p) is not ForeignParameter]
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in own}.values()), sum(
        p.nbytes for p in own
    )


def test_blocks_that_are_computed_again_gather_again():
    assert_same_as_one_process({"blocks computed again": RUNS["blocks computed again"]})


@pytest.mark.slow
def test_what_steps_may_do():
    assert_same_as_one_process({name: run for name, run in RUNS.items() if name not in SLOW})


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_what_else_steps_may_do():
    assert_same_as_one_process({name: RUNS[name] for name in SLOW if name in RUNS}, timeout=200.0)


def assert_same_as_one_process(runs: dict[str, tuple[Case, dict[str, Any]]], timeout: float = 50.0) -> None:
    references = {}
    for case, _ in runs.values():
        key = (case.make, *case.trainer)
        if key not in references:
            references[key] = one_process(case.but(loader=lambda: loader(8), at_end=None))
    for (case, _), records in zip(runs.values(), on_mesh(*runs.values(), timeout=timeout), strict=True):
        assert_all_rows(case, references[(case.make, *case.trainer)], records)
        for held, whole in (record.extra for record in records if record.extra is not None):
            assert held < 2 / 3 * whole, "a half, and a number behind each part"


class Thawed(Averaged):
    """A layer trains from the second epoch on, in a group of its own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.net[0].requires_grad_(False)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": list(self.net[0].parameters())})


def parameters_after(trainer: Trainer, module: Any) -> dict[str, torch.Tensor]:
    """After a run an average is what the model has."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.skipif(not hasattr(of_lightning, "EMAWeightAveraging"), reason="Lightning has it from version 2.6 on")
@pytest.mark.parametrize("options", [THREE, pytest.param(EACH, marks=pytest.mark.slow)], ids=["step", "microbatch"])
def test_averages_of_a_layer_that_is_added_to_the_optimizer_later(options: dict[str, Any]):
    average = {"max_epochs": 3, "callbacks": lambda: [of_lightning.EMAWeightAveraging(decay=0.5)]}
    case = Case(Thawed, lambda: loader(4, 2), trainer=average, after=parameters_after)
    [records] = on_mesh((case, options), stages=1)
    reference = one_process(case.but(loader=lambda: loader(8)))
    assert_all_rows(case, reference, records)
    for record in records:
        torch.testing.assert_close(record.extra, reference.extra, rtol=1e-3, atol=1e-4)
    assert not torch.equal(reference.extra["net.0.weight"], reference.initial["net.0.weight"])


@pytest.mark.slow
def test_a_parameter_that_only_one_copy_uses():
    case = Case(Conditional, lambda: loader(2), trainer={"max_epochs": 2}, validate=False)
    ways = [{"num_microbatches": 1, **states} for states in ({}, THREE, {"zero_stage": 1})]
    plain, *divided = on_mesh(*((case, way) for way in ways), stages=1)
    for record in [record for records in divided for record in records]:
        for name, value in plain[0].own.items():
            assert torch.equal(record.own[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_weight_that_two_stages_share_stays_one_over_three_copies(stage: int):
    case = two_epochs(Tied, 3, **NO_VALIDATION)
    [records] = on_mesh((case, {**TWO, "zero_stage": stage}), copies=3)
    assert_all_rows(case, one_process(case.but(loader=lambda: loader(12))), records)
    held = [record.own["net.0.weight"] for record in records]
    assert len(held) == 6 and all(torch.equal(weight, held[0]) for weight in held)


@pytest.mark.slow
def test_float16_has_one_scale_and_skips_steps_everywhere():
    """As copies that divide nothing: what overflows on one rank is found on all, or parts of weights would part."""
    options = {"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    case = Case(
        lambda: with_sgd(LoudInput(), lr=1e-3),
        lambda: row_loader((8,) * 9, seed=int(os.environ["RANK"]) // 2),
        trainer=options,
        at_end=scale_and_skips,
    )
    ways = [{}, {"zero_stage": 1}, EACH]
    runs = on_mesh(*((case.but(trainer={"plugins": half_precision()}), way) for way in ways))
    assert runs[0][0].extra[0] < 2.0**20, "steps were skipped"
    for records in runs[1:]:
        assert [record.extra for record in records] == [runs[0][0].extra] * 4
        for name, value in runs[0][0].weights.items():
            torch.testing.assert_close(records[0].weights[name], value, **HALF)


def test_copies_with_unequal_numbers_of_batches_are_told():
    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 4, port)
        options = {"max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 0}
        case = Case(Classifier, lambda: row_loader((4,) * (3 + rank // 2)), trainer=options)
        fit(case, HybridStrategy(data_parallel_size=2, pipeline_parallel_size=2, num_microbatches=2, **EACH), 4)

    with pytest.raises(ValueError, match="have come to the end of their training batches"):
        run_ranks(run, 4, free_port(), group=False, timeout=50.0)


class Failing(Classifier):
    """Fails on one copy, in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and os.environ["RANK"] == "2":
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("options", [TWO, THREE, EACH], ids=["stage 2", "step", "microbatch"])
def test_a_failure_on_one_copy_ends_those_that_wait_for_its_parts(options: dict[str, Any]):
    with pytest.raises(KeyError, match=r"rank 2\) failed in the forward of micro-batch 0\n"):
        on_mesh((Case(Failing, lambda: loader(4), validate=False), options))


def test_copies_with_unequal_micro_batches_are_told():
    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        options = {"max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 0}
        case = Case(Averaged, lambda: row_loader((4, 2 - rank)), trainer=options)
        fit(case, HybridStrategy(data_parallel_size=2, num_microbatches=2, **EACH), 2)

    with pytest.raises(ValueError, match="batches of 1 to 2 micro-batches in one step"):
        run_ranks(run, 2, free_port(), group=False, timeout=50.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_stage": 4}, "zero_stage is 0, 1, 2 or 3"),
        ({"zero_stage": 2, "gather": "microbatch"}, 'gather is "step", or "microbatch" with zero_stage=3'),
        ({"zero_stage": 3, "cuda_graphs": True}, "cuda_graphs is False with zero_stage=3"),
        ({"zero_stage": 1, "bucket_mb": 0}, "bucket_mb is a size above 0"),
    ],
)
def test_arguments_that_do_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        HybridStrategy(**options)


class Apart(Classifier):
    """A hook changes a weight on one rank alone."""

    def on_train_batch_end(self, *_: Any) -> None:
        if os.environ["RANK"] == "1":
            self.net[0].weight.data.mul_(1.5)


@pytest.mark.slow
def test_replicas_of_divided_stages_are_compared():
    case = Case(Apart, lambda: loader(4), trainer={"max_epochs": 1}, validate=False)
    with pytest.raises(ValueError, match=r"Parameter `net.0.weight` of stage 0 is no longer the same on all ranks"):
        on_mesh((case, {**THREE, "schedule": "chimera"}))


WAYS = [(0, "step"), (1, "step"), (2, "step"), (3, "step"), (3, "microbatch")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("data", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_every_factorization_of_four_ranks_is_one_process(schedule: str, data: int):
    """Three steps of AdamW, clipped, two batches a step, on a GPT of eight blocks: losses, weights, states."""
    case = gpt_case(accumulate_grad_batches=2).but(make=lambda: gpt(num_blocks=8))
    ways = WAYS if data > 1 else WAYS[:1]  # one copy divides nothing
    options = {"schedule": schedule, "bucket_mb": 1e-3}
    meshes = [Mesh(data, 4 // data, 1, {**options, "zero_stage": stage, "gather": gather}) for stage, gather in ways]
    reference = one_process(case)
    for mesh, records in zip(meshes, on_meshes([(case, mesh) for mesh in meshes], timeout=200.0), strict=True):
        assert_one_process(records, reference, mesh)


class Between(Callback):
    """Looks at gradients between two batches that accumulate: whether they are whole."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 0:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.whole = {not isinstance(gradient, ShardedGradient) for gradient in gradients}


def test_gradients_that_accumulate_are_divided_from_stage_2_on():
    """Stage 1 holds them whole until the step, stage 2 no more than a part, also between batches."""
    looked = lambda trainer, module: next(c.whole for c in trainer.callbacks if isinstance(c, Between))  # noqa: E731
    case = gpt_case(accumulate_grad_batches=2, callbacks=lambda: [Between()], max_steps=1).but(at_end=looked)
    stages = on_meshes([(case, Mesh(2, 1, 1, {"zero_stage": stage})) for stage in (1, 2)])
    assert [[record.extra for record in records] for records in stages] == [[{True}] * 2, [{False}] * 2]


class Alone(Classifier):
    """Rank 0 waits for the others, which are in the next epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))  # ZeRO's ranks have one's before every step

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("alone", 1.0, sync_dist=True)


WAITS = {
    "copies": (partial(HybridStrategy, data_parallel_size=2, zero_stage=3), "where an epoch or an evaluation begins"),
    "ZeRO": (partial(ZeROStrategy, stage=1), "to have one's buffers"),
}


@pytest.mark.parametrize("name", WAITS)
def test_ranks_that_wait_for_different_things_are_told_also_at_the_start_of_an_epoch(name: str):
    make, waits_for = WAITS[name]

    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        options = {"max_epochs": 2, "use_distributed_sampler": False, "limit_val_batches": 0}
        case = Case(Alone, lambda: row_loader((4,) * 2), trainer=options)
        fit(case, make(patience=QUICK), 2)

    with pytest.raises(StageError, match=rf"rank 1\)?: the other ranks, {waits_for}"):
        run_ranks(run, 2, free_port(), group=False, timeout=30.0)
