"""Whole Trainer runs of a small GPT on meshes of forked ranks, and in one process with all rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import HybridStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.pipelines import Case, Record, assert_same_optimizer, fit, join_as_torchrun

ROWS, TOKENS = 8, 12  # of a step of all copies together
# Sums over rows are taken copy by copy and micro-batch by micro-batch, in another order than one process takes them.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# AdamW divides by the root of second moments: where a gradient nearly vanishes, its rounding decides the step. The
# step is at most the learning rate (1e-3) a time, of which a gradient's rounding moves a part.
ADAM = {"rtol": 1e-3, "atol": 2e-5}


@dataclass(frozen=True)
class Mesh:
    """Sizes along the axes; ranks are (data, pipeline, tensor) unless `order` says otherwise."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.data * self.pipeline * self.tensor

    def place(self, rank: int) -> int:
        """Where a rank is along the data axis."""
        order = self.options.get("mesh_order", ("data", "pipeline", "tensor"))
        places = product(*(range(getattr(self, axis)) for axis in order))
        return list(places)[rank][list(order).index("data")]

    def strategy(self) -> HybridStrategy:
        sizes = {
            "data_parallel_size": self.data,
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.tensor,
        }
        return HybridStrategy(**sizes, **{"num_microbatches": 4 // self.data, **self.options})


def gpt(**options: Any) -> GPT:
    """Four blocks, tied embeddings."""
    return GPT(**{"vocabulary": 19, "context": 16, "width": 16, "num_blocks": 4, "num_heads": 2, **options})


def token_loader(copies: int = 1, place: int = 0, steps: int = 6) -> DataLoader:
    """Ready batches of this copy's share of the rows of each step."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(19, (ROWS, TOKENS), generator=generator) for _ in range(steps)]
    return DataLoader([{"input_ids": batch.chunk(copies)[place]} for batch in batches], batch_size=None)


def gpt_case(**trainer: Any) -> Case:
    """Three steps of the optimizer, clipped."""
    options = {"max_steps": 3, "gradient_clip_val": 0.5, "use_distributed_sampler": False, **trainer}
    return Case(gpt, token_loader, trainer=options, validate=False)


def on_meshes(jobs: Sequence[tuple[Case, Mesh]], timeout: float = 55.0) -> list[list[Record]]:
    """Runs one after the other in one launch, each on its mesh of equally many ranks; for each one record a rank."""
    [size] = {mesh.size for _, mesh in jobs}

    def run(rank: int, port: int) -> list[Record]:
        join_as_torchrun(rank, size, port)
        return [
            fit(case.but(loader=lambda m=mesh: token_loader(m.data, m.place(rank))), mesh.strategy(), size)
            for case, mesh in jobs
        ]

    results = run_ranks(run, size, free_port(), group=False, timeout=timeout)
    return [list(of_job) for of_job in zip(*results, strict=True)]


def assert_one_process(records: Sequence[Record], reference: Record, mesh: Mesh) -> None:
    """Losses, weights and the optimizer's state are those of one process with all rows."""
    by_place: dict[int, Any] = {}
    for rank, record in enumerate(records):
        by_place[mesh.place(rank)] = torch.stack(record.losses)
        for name, value in record.own.items():
            torch.testing.assert_close(value, reference.weights[name], **ADAM)
    mean = torch.stack(list(by_place.values())).mean(0)
    torch.testing.assert_close(mean, torch.stack(reference.losses), **CLOSE)
    assert list(records[0].weights) == list(reference.weights)
    for name, value in reference.weights.items():
        torch.testing.assert_close(records[0].weights[name], value, **ADAM)
    for ours, theirs in zip(records[0].optimizers, reference.optimizers, strict=True):
        assert_same_optimizer(ours, theirs, ADAM)
