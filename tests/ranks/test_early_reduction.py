"""Buckets that are sent before all gradients are made give the same means as buckets that are not."""

import torch
from torch import nn

from lightning_parallel.zero.native.partition import Options, Partition
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.sharded_gradient import gather_gradient
from tests.harness import run_ranks


def reduced(rank: int, stage: int, late_on: tuple[int, ...]) -> list[torch.Tensor]:
    """Two layers' gradients: the first bucket is sent, then some ranks add to it; every rank's sum is known."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    partition = Partition(module, [optimizer], Ranks(rank, 2), Options(stage, bucket_bytes=1))
    reducer = partition.reducer
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(rank + 1))
    reducer.send(0)
    first = partition.buckets[0].parameters[0]
    assert first.grad is None, "it is on its way"
    if rank in late_on:
        first.grad = torch.full_like(first, 10.0)
    reducer.reduce_made([0, 1])
    return [gather_gradient(bucket.parameters[0].grad) for bucket in partition.buckets]


def test_what_comes_late_is_reduced_again():
    def run(rank: int) -> list[list[torch.Tensor]]:
        return [reduced(rank, stage, late_on) for stage in (1, 2, 3) for late_on in ((), (1,), (0, 1))]

    for results in run_ranks(run, 2):
        for (first, second), late in zip(results, [0.0, 5.0, 10.0] * 3, strict=True):
            assert torch.equal(first, torch.full_like(first, 1.5 + late))
            assert torch.equal(second, torch.full_like(second, 1.5))
