"""A mesh of data x pipeline x tensor ranks trains as one process with all rows."""

import pytest

from lightning_parallel.degrees import Degrees
from lightning_parallel.strategies import HybridStrategy
from tests.trainer.hybrids import Mesh, assert_one_process, gpt_case, on_meshes
from tests.trainer.pipelines import one_process

SMALL = {"bucket_mb": 1e-3}  # several buckets a stage
MESHES = {
    "1 x 2 x 2": Mesh(1, 2, 2),
    "2 x 1 x 2, tensor outermost": Mesh(2, 1, 2, {"mesh_order": ("tensor", "data", "pipeline")}),
    "2 x 2 x 1, pipeline outermost": Mesh(2, 2, 1, {"mesh_order": ("pipeline", "tensor", "data")}),
    "stage 1": Mesh(2, 2, 1, {"zero_stage": 1, **SMALL}),
    "stage 2, zb_v": Mesh(2, 2, 1, {"zero_stage": 2, "schedule": "zb_v", **SMALL}),
    "stage 3": Mesh(2, 2, 1, {"zero_stage": 3, "schedule": "interleaved_1f1b", **SMALL}),
    "stage 3, a micro-batch": Mesh(2, 2, 1, {"zero_stage": 3, "gather": "microbatch", "schedule": "zb_v", **SMALL}),
    "stage 3, four copies": Mesh(4, 1, 1, {"zero_stage": 3, "num_microbatches": 2, "gather": "microbatch", **SMALL}),
}


def test_layouts_of_four_ranks_are_one_process():
    """Three steps of AdamW, clipped, two batches a step: losses, weights, the optimizer's states."""
    case = gpt_case(accumulate_grad_batches=2)
    reference = one_process(case)
    for mesh, records in zip(MESHES.values(), on_meshes([(case, mesh) for mesh in MESHES.values()]), strict=True):
        assert_one_process(records, reference, mesh)


def test_one_size_follows_from_the_devices_and_the_order_is_the_meshs():
    sizes = {"data": None, "pipeline": 2, "tensor": 2}
    assert Degrees(sizes).axes(8) == {"data": 2, "pipeline": 2, "tensor": 2}
    assert list(Degrees(sizes, ("pipeline", "data", "tensor")).axes(12).items())[1] == ("data", 3)


@pytest.mark.parametrize(
    ("sizes", "order", "world", "words"),
    [
        ({"data": 2, "pipeline": 0, "tensor": 1}, None, 2, r"pipeline_parallel_size=0: give a number of ranks"),
        ({"data": None, "pipeline": None, "tensor": 1}, None, 2, r"data_parallel_size and pipeline_parallel_size are"),
        ({"data": 2, "pipeline": 2, "tensor": 1}, ("data", "pipeline"), 4, r"mesh_order=\('data', 'pipeline'\): give"),
        ({"data": 2, "pipeline": 2, "tensor": 1}, None, 6, r"The mesh data 2 x pipeline 2 x tensor 1 needs 4 ranks"),
        ({"data": None, "pipeline": 2, "tensor": 2}, None, 6, r"data \? x pipeline 2 x tensor 2 needs a multiple of 4"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes, order, world, words):
    with pytest.raises(ValueError, match=words):
        Degrees(sizes, *([] if order is None else [order])).axes(world)


def test_a_strategy_checks_its_sizes_when_it_is_made():
    with pytest.raises(ValueError, match=r"tensor_parallel_size=1\.5: give a number of ranks"):
        HybridStrategy(tensor_parallel_size=1.5)
