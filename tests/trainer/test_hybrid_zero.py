"""ZeRO inside the data axis of a pipeline: what steps may do there, and what is refused in words."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging

from lightning_parallel.errors import StageError
from lightning_parallel.strategies import HybridStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.hybrids import Mesh, assert_one_process, gpt, gpt_case, on_meshes
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import HALF, Case, Record, fit, join_as_torchrun, one_process
from tests.trainer.test_data_axis import Averaged, Conditional, Tied, Twice, assert_all_rows, loader
from tests.trainer.test_parity import LoudInput, half_precision, scale_and_skips, with_sgd

THREE = {"zero_stage": 3, "bucket_mb": 1e-4}
EACH = {**THREE, "gather": "microbatch"}


def on_mesh(case: Case, copies: int = 2, stages: int = 2, **options: Any) -> list[Record]:
    """The run on so many copies of so many stages."""

    def run(rank: int, port: int) -> Record:
        join_as_torchrun(rank, copies * stages, port)
        sizes = {"data_parallel_size": copies, "pipeline_parallel_size": stages}
        return fit(case, HybridStrategy(**sizes, **{"num_microbatches": 2, **options}), copies * stages)

    return run_ranks(run, copies * stages, free_port(), group=False, timeout=50.0)


def assert_rows(make: Any, copies: int = 2, stages: int = 2, options: Any = EACH, **trainer: Any) -> list[Record]:
    """Two epochs on all rows, with an evaluation after each, are one process's."""
    rows = 4 if copies == 2 else 12 // copies
    case = Case(make, lambda: loader(rows, copies), trainer={"max_epochs": 2, **trainer})
    records = on_mesh(case, copies, stages, **options)
    assert_all_rows(case, one_process(case.but(loader=lambda: loader(rows * copies))), records)
    return records


@pytest.mark.parametrize("options", [THREE, EACH], ids=["step", "microbatch"])
def test_evaluations_between_epochs(options):
    assert_rows(Averaged, options=options)


def test_a_step_that_calls_the_model_twice():
    assert_rows(Twice)


def test_a_parameter_that_only_one_copy_uses():
    case = Case(Conditional, lambda: loader(2), trainer={"max_epochs": 2}, validate=False)
    plain = on_mesh(case, 2, 1, num_microbatches=1)
    for options in (THREE, {"zero_stage": 1}):
        for record in on_mesh(case, 2, 1, num_microbatches=1, **options):
            for name, value in plain[0].own.items():
                assert torch.equal(record.own[name], value), name


@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_what_is_recomputed_is_gathered(recompute: str):
    assert_rows(Averaged, options={**EACH, "recompute": recompute}, limit_val_batches=0)


def test_two_directions_divide_gradients():
    assert_rows(Averaged, options={"zero_stage": 2, "bucket_mb": 1e-4, "schedule": "chimera"}, limit_val_batches=0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_weight_that_two_stages_share_stays_one_over_three_copies(stage: int):
    records = assert_rows(Tied, 3, 2, {"zero_stage": stage, "bucket_mb": 1e-4}, limit_val_batches=0)
    held = [record.own["net.0.weight"] for record in records]
    assert len(held) == 6 and all(torch.equal(weight, held[0]) for weight in held)


def test_float16_has_one_scale_and_skips_steps_everywhere():
    """As copies that divide nothing: what overflows on one rank is found on all, or parts of weights would part."""
    options = {"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    case = Case(
        lambda: with_sgd(LoudInput(), lr=1e-3),
        lambda: row_loader((8,) * 9, seed=int(os.environ["RANK"]) // 2),
        trainer=options,
        at_end=scale_and_skips,
    )
    runs = [
        on_mesh(case.but(trainer={"plugins": half_precision()}), 2, 2, **states)
        for states in ({}, {"zero_stage": 1}, EACH)
    ]
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

    with pytest.raises(StageError, match="have come to the end of their training batches"):
        run_ranks(run, 4, free_port(), group=False, timeout=50.0)


def test_copies_with_unequal_micro_batches_are_told():
    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        options = {"max_epochs": 1, "use_distributed_sampler": False, "limit_val_batches": 0}
        case = Case(Averaged, lambda: row_loader((4, 2 - rank)), trainer=options)
        fit(case, HybridStrategy(data_parallel_size=2, num_microbatches=2, **EACH), 2)

    with pytest.raises(StageError, match="batches of 1 to 2 micro-batches in one step"):
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


@pytest.mark.parametrize(
    ("strategy", "callbacks", "words"),
    [
        ({"schedule": "chimera"}, list, r"zero_stage=3\) divides parameters, and schedule 'chimera' keeps two"),
        ({}, lambda: [WeightAveraging()], r"a callback that averages weights reads all of them\. Use zero_stage=2"),
    ],
)
def test_what_reads_whole_parameters_is_refused(strategy, callbacks, words):
    case = Case(Averaged, lambda: loader(4), trainer={"max_epochs": 1, "callbacks": callbacks})
    with pytest.raises(StageError, match=words):
        on_mesh(case, **THREE, **strategy)


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
