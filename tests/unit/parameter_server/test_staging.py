"""Vectors between a worker's device and the host, on every device that is there."""

import pytest
import torch

from lightning_parallel.parameter_server.table import Table
from lightning_parallel.parameter_server.trainer.staging import Staging

CUDA = pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("num_ranges", [1, 3])
def test_what_goes_out_and_comes_in_is_what_was_packed(device, num_ranges):
    on_host = [[torch.randn(700, 30), torch.randn(5).bfloat16()], [torch.randn(11)]]
    groups = [[tensor.to(device) for tensor in group] for group in on_host]
    table = Table.of(groups, num_ranges)
    staging = Staging(table, torch.device(device))
    for _ in range(20):  # pinned memory is used again
        out = staging.out(staging.pack(groups))
        assert out.device.type == "cpu" and torch.equal(out, table.pack(on_host))
        staging.into(out * 2, groups)
        staging.into(out, groups)
        for ours, theirs in zip(groups, on_host, strict=True):
            assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_memory_is_pinned_where_there_is_a_device_that_needs_it(device):
    memory = Staging(Table.of([[torch.zeros(4)]]), torch.device(device)).memory(4)
    assert memory.shape == (4,) and memory.is_pinned() == (device != "cpu")
