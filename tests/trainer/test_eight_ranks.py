"""Meshes of eight ranks train as one process: every axis at once, and each by itself."""

import pytest

from tests.trainer.hybrids import Mesh, assert_one_process, gpt, gpt_case, on_meshes
from tests.trainer.pipelines import one_process

pytestmark = [pytest.mark.slow, pytest.mark.hours, pytest.mark.timeout(600)]
SMALL = {"bucket_mb": 1e-3}
SIZES = [
    (8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_factorization_of_eight_ranks_is_one_process(zero: int, schedule: str):
    """Three steps of AdamW, clipped, two batches a step, on a GPT of sixteen blocks: losses, weights, states."""
    case = gpt_case(accumulate_grad_batches=2).but(make=lambda: gpt(num_blocks=16, num_heads=8, width=32))
    reference = one_process(case)
    meshes = [
        Mesh(*sizes, {"zero_stage": zero, "schedule": schedule, "num_microbatches": 8 // sizes[0], **SMALL})
        for sizes in SIZES
        if (zero == 0 or sizes[0] > 1) and fits(schedule, 8 // sizes[0], sizes[1])
    ]
    for mesh, records in zip(meshes, on_meshes([(case, mesh) for mesh in meshes], timeout=500.0), strict=True):
        assert_one_process(records, reference, mesh)


def fits(schedule: str, microbatches: int, ranks: int) -> bool:
    """Whether the schedule can be made: interleaved ones go in groups of as many micro-batches as ranks."""
    return microbatches >= ranks or schedule == "1f1b"
