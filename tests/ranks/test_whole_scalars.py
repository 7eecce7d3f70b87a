"""Means of tensors whose shards differ in length are those of the whole, also where a sum in 16 bits would overflow."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_parallel.zero.fsdp2.whole_scalars import WholeScalars
from tests.harness import run_ranks


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def on_rank(rank: int) -> None:
    scalars = WholeScalars(lambda what: nullcontext())
    mesh = init_device_mesh("cpu", (2,))
    for dtype in (torch.float32, torch.float16):
        value = (1000 * torch.arange(1, 16).view(3, 5)).to(dtype)  # rank 0 has two rows; their sum is above 65504
        divided = distribute_tensor(value, mesh, [Shard(0)])
        for make in (torch.mean, lambda x: x.mean(0), lambda x: x.mean(1, keepdim=True), lambda x: x.mean((0, 1))):
            torch.testing.assert_close(whole(make(divided)), make(value))
        torch.testing.assert_close(whole(divided.mean(dtype=torch.float64)), value.mean(dtype=torch.float64))
    with pytest.raises(RuntimeError, match="mean"):
        distribute_tensor(torch.ones(3, 5, dtype=torch.int64), mesh, [Shard(0)]).mean()
    scalars.remove()


def test_means_of_uneven_shards_are_the_whole_s():
    run_ranks(on_rank, 2)
