"""The layouts whose weights and collectives are written down: adding one is adding an entry, then recording it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lightning.pytorch import LightningModule

from lightning_parallel.parameter_server.filters import TopK
from lightning_parallel.strategies import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.nets import models

# Rows and micro-batches are added up in another order than one process does: float32 rounding of values around 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# AdamW divides by the root of second moments: where a gradient nearly vanishes its rounding decides the step, which is
# at most the learning rate (1e-2), of which rounding moves a part.
ADAM = {"rtol": 1e-3, "atol": 2e-4}
BF16 = {"rtol": 2e-2, "atol": 1e-2}  # 8 bits of mantissa (4e-3), rounded at other places than one process does
CLIPPED = {"gradient_clip_val": 0.05}
ACCUMULATED = {"accumulate_grad_batches": 2}
VALIDATED = {"limit_val_batches": 2}
SMALL = {"bucket_mb": 1e-3}  # a block of the GPT takes several
SMALLER = {"bucket_mb": 2e-4}  # as do the layers of the others


@dataclass(frozen=True)
class Layout:
    """A strategy, what it trains, and how.

    Args:
        make: builds the strategy.
        ranks: how many processes run it.
        model: builds the module.
        trainer: options of the Trainer, which makes three steps.
        copies: how many copies of the model see rows of their own.
        place: the copy that a rank belongs to.
        tolerance: of weights beside one process, where this machine's bits are not those of the snapshot; None where
            one process is not equal (dropout: it draws other numbers; workers that each clip their own gradients).
        calls: whether ranks ask torch.distributed for anything; not so with servers, whose messages have no order.
        engine: the package of others, if any, that has to be there, and makes calls too.
        slow: whether `make test` leaves it out.
    """

    make: Callable[[], Any]
    ranks: int = 2
    model: Callable[[], LightningModule] = models.gpt
    trainer: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    place: Callable[[int], int] = lambda rank: 0
    tolerance: Mapping[str, float] | None = field(default_factory=lambda: ADAM)
    calls: bool = True
    slow: bool = True
    engine: str = ""

    @property
    def batches_per_step(self) -> int:
        return int(self.trainer.get("accumulate_grad_batches", 1))


def pipeline(schedule: str, ranks: int = 2, other: Mapping[str, Any] | None = None, **layout: Any) -> Layout:
    """A pipeline of four micro-batches."""
    options = {"num_microbatches": 4, **(other or {})}
    return Layout(lambda: PipelineStrategy(schedule=schedule, **options), ranks, **layout)


def zero(stage: int, ranks: int = 2, other: Mapping[str, Any] | None = None, **layout: Any) -> Layout:
    """ZeRO; every rank has rows of its own."""
    options = {**SMALLER, **(other or {})}
    layout = {"model": models.adam_rows, **layout}
    return Layout(lambda: ZeROStrategy(stage=stage, **options), ranks, copies=ranks, place=lambda rank: rank, **layout)


def mesh(sizes: Sequence[int], other: Mapping[str, Any] | None = None, **layout: Any) -> Layout:
    """Data x pipeline x tensor."""
    data, stages, tensor = sizes
    options = {
        "num_microbatches": 2 if stages > 1 else None, "data_parallel_size": data, "pipeline_parallel_size": stages,
        "tensor_parallel_size": tensor, **(other or {}),
    }  # fmt: skip
    order = options.get("mesh_order", ("data", "pipeline", "tensor"))
    sizes_of = {"data": data, "pipeline": stages, "tensor": tensor}
    at = list(product(*(range(sizes_of[axis]) for axis in order)))
    place = lambda rank: at[rank][list(order).index("data")]  # noqa: E731
    return Layout(lambda: HybridStrategy(**options), len(at), copies=data, place=place, **layout)


def servers(consistency: str = "bsp", ranks: int = 2, other: Mapping[str, Any] | None = None, **layout: Any) -> Layout:
    """Parameter servers; every worker has rows of its own."""
    options = {"lease": 30.0, **(other or {})}
    layout = {"model": models.rows, "tolerance": CLOSE, "calls": False, "engine": "zmq", **layout}
    make = lambda: ParameterServerStrategy(consistency, **options)  # noqa: E731
    return Layout(make, ranks, copies=ranks, place=lambda rank: rank, **layout)


ALONG_DATA = {"data_parallel_size": 2}
TWO_ALONG_DATA = {"copies": 2, "place": lambda rank: rank // 2}

LAYOUTS: dict[str, Layout] = {
    # pipelines
    "pipeline 1f1b": pipeline("1f1b", trainer=CLIPPED, slow=False),
    "pipeline 1f1b, rows": pipeline("1f1b", model=models.rows, tolerance=CLOSE),
    "pipeline 1f1b, dropout": pipeline("1f1b", model=lambda: models.rows(dropout=0.3), tolerance=None),
    "pipeline 1f1b, recompute, accumulated": pipeline(
        "1f1b", other={"recompute": "stage"}, trainer={**CLIPPED, **ACCUMULATED}
    ),
    "pipeline 1f1b, bf16-mixed": pipeline(
        "1f1b", model=models.rows, trainer={"precision": "bf16-mixed"}, tolerance=BF16
    ),
    "pipeline 1f1b, two copies": pipeline("1f1b", 4, ALONG_DATA, **TWO_ALONG_DATA),
    "pipeline 1f1b, sharded": pipeline("1f1b", 4, {"state_dict_type": "sharded"}),
    "pipeline 1f1b, skip connections": pipeline(
        "1f1b",
        other={"skip_connections": True, "blocks": ["down.0", "down.1", "up.0", "up.1"]},
        model=models.UNet,
        tolerance=CLOSE,
    ),
    "pipeline 1f1b, validated": pipeline("1f1b", trainer=VALIDATED),
    "pipeline gpipe, dynamic shapes": pipeline("gpipe", other={"dynamic_shapes": True}),
    "pipeline gpipe": pipeline("gpipe", 4),
    "pipeline interleaved_1f1b": pipeline("interleaved_1f1b", trainer=ACCUMULATED),
    "pipeline looped_bfs": pipeline("looped_bfs"),
    "pipeline zb_h1": pipeline("zb_h1"),
    "pipeline zb_v": pipeline("zb_v", trainer=CLIPPED, slow=False),
    "pipeline dualpipe_v": pipeline("dualpipe_v"),
    "pipeline dualpipe": pipeline("dualpipe", 4),
    "pipeline chimera": pipeline("chimera", trainer=CLIPPED, slow=False),
    "pipeline gems": pipeline("gems"),
    "pipeline terapipe": pipeline("terapipe", other={"slices": 3, "num_microbatches": 2}),
    # ZeRO
    "zero 1": zero(1, trainer=CLIPPED),
    "zero 2": zero(2, trainer={**CLIPPED, **ACCUMULATED}, slow=False),
    "zero 2, groups of two": zero(2, 4, {"shard_size": 2}),
    "zero 2, bf16-true with copies of 32 bits": zero(2, trainer={"precision": "bf16-true"}, tolerance=BF16),
    "zero 2, fsdp2": zero(2, other={"engine": "fsdp2"}, trainer=ACCUMULATED, engine="torch"),
    "zero 3, fsdp2": zero(3, trainer=CLIPPED, engine="torch", slow=False),
    "zero 2, validated": zero(2, trainer=VALIDATED),
    "zero 3, fsdp2, validated": zero(3, trainer=VALIDATED, engine="torch"),
    "zero 3, fsdp2, bf16-mixed, recomputed": zero(
        3,
        other={"activation_checkpointing": True, "bucket_mb": 128.0},
        trainer={"precision": "bf16-mixed"},
        tolerance=BF16,
        engine="torch",
    ),
    **{
        f"zero {stage}, deepspeed": zero(
            stage, other={"engine": "deepspeed"}, trainer={**CLIPPED, **ACCUMULATED}, engine="deepspeed"
        )
        for stage in (1, 2, 3)
    },
    # meshes
    "hybrid 2x1x1, zero 0": mesh((2, 1, 1), trainer=CLIPPED),
    "hybrid 2x1x1, zero 2": mesh((2, 1, 1), {"zero_stage": 2, **SMALL}, trainer={**CLIPPED, **ACCUMULATED}),
    "hybrid 2x1x1, zero 3": mesh((2, 1, 1), {"zero_stage": 3, **SMALL}, trainer=CLIPPED, slow=False),
    "hybrid 2x2x1, zero 1, zb_v": mesh((2, 2, 1), {"zero_stage": 1, "schedule": "zb_v", **SMALL}, trainer=CLIPPED),
    "hybrid 2x2x1, zero 3 by micro-batch": mesh((2, 2, 1), {"zero_stage": 3, "gather": "microbatch", **SMALL}),
    "hybrid 2x2x1, zero 3, validated": mesh((2, 2, 1), {"zero_stage": 3, **SMALL}, trainer=VALIDATED),
    "hybrid 1x2x2": mesh((1, 2, 2), trainer=CLIPPED),
    "hybrid 2x1x2, zero 2, pipeline outermost": mesh(
        (2, 1, 2), {"zero_stage": 2, "mesh_order": ("pipeline", "tensor", "data"), **SMALL}
    ),
    "tensor": Layout(TensorParallelStrategy, trainer=CLIPPED, slow=False),
    "tensor, sequence and loss parallel": Layout(
        lambda: TensorParallelStrategy(sequence_parallel=True, loss_parallel=True)
    ),
    "tensor, overlapped": Layout(lambda: TensorParallelStrategy(overlap_sums=True), trainer=ACCUMULATED),
    # parameter servers
    "servers bsp": servers(slow=False),
    "servers bsp, two servers, AdamW": servers(
        other={"num_servers": 2, "replication": 2}, model=models.adam_rows, tolerance=ADAM
    ),
    "servers bsp, workers step, accumulated": servers(
        other={"update": "worker"}, trainer={**CLIPPED, **ACCUMULATED}, tolerance=None
    ),
    "servers bsp, filtered": servers(other={"filters": [TopK(0.25)]}, tolerance=None),
    "servers ssp, one worker": servers("ssp", 1),
    "servers in an island": servers("ssp", 2, {"island_size": 2, "staleness": 1}),
}
