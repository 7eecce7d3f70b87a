"""Meshes of four and eight ranks train as one process: every axis at once, and each by itself."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_parallel.demo.huggingface import HuggingFaceLM
from tests.trainer.hybrids import Mesh, assert_one_process, gpt, gpt_case, on_meshes
from tests.trainer.pipelines import one_process

pytestmark = [pytest.mark.slow, pytest.mark.hours, pytest.mark.timeout(600)]
SMALL = {"bucket_mb": 1e-3}
SIZES = {
    4: [(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)],
    8: [
        (8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8),
    ],
}  # fmt: skip


def sixteen_blocks() -> Any:
    return gpt(num_blocks=16, num_heads=8, width=32)


def llama() -> HuggingFaceLM:
    """Its two heads of keys are fewer than four or eight ranks of a tensor axis."""
    module = HuggingFaceLM("llama", vocabulary=19, context=16, width=32, num_blocks=16, num_heads=8)
    module.model.config.num_key_value_heads = 2
    module.model = type(module.model)(module.model.config)
    return module


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("make", [sixteen_blocks, llama])
def test_every_factorization_is_one_process(make: Callable[[], Any], ranks: int, zero: int, schedule: str):
    """Three steps of AdamW, clipped, two batches a step, on sixteen blocks: losses, weights, states."""
    meshes = [
        Mesh(*sizes, {"zero_stage": zero, "schedule": schedule, "num_microbatches": 8 // sizes[0], **SMALL})
        for sizes in SIZES[ranks]
        if (zero == 0 or sizes[0] > 1) and fits(schedule, 8 // sizes[0], sizes[1])
    ]
    assert_one_processs(make, meshes)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("make", [sixteen_blocks, llama])
def test_slices_of_the_sequence_are_one_process(make: Callable[[], Any], zero: int, schedule: str):
    """Every factorization of eight in which the tensor axis has two or four ranks, which divide twelve positions."""
    options = {"zero_stage": zero, "schedule": schedule, "sequence_parallel": True, **SMALL}
    meshes = [
        Mesh(*sizes, {**options, "num_microbatches": 8 // sizes[0]})
        for sizes in SIZES[8]
        if sizes[2] in (2, 4) and (zero == 0 or sizes[0] > 1) and fits(schedule, 8 // sizes[0], sizes[1])
    ]
    assert_one_processs(make, meshes)


def assert_one_processs(make: Callable[[], Any], meshes: list[Mesh]) -> None:
    case = gpt_case(accumulate_grad_batches=2).but(make=make)
    reference = one_process(case)
    for mesh, records in zip(meshes, on_meshes([(case, mesh) for mesh in meshes], timeout=500.0), strict=True):
        assert_one_process(records, reference, mesh)


def fits(schedule: str, microbatches: int, ranks: int) -> bool:
    """Whether the schedule can be made: interleaved ones go in groups of as many micro-batches as ranks."""
    return microbatches >= ranks or schedule == "1f1b"
