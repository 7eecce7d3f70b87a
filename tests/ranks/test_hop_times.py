"""The time of a transfer, which `schedule="auto"` asks for: by a clock that the test sets."""

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.pipeline.planning import auto
from tests.harness import run_ranks

ROUND_TRIPS_S = [100.0, 2.0, 2.0, 40.0, 1.0, 2.0]  # the first opens connections, and in one the host was busy


def asked(rank: int) -> float | None:
    cpu = torch.device("cpu")
    if rank == 1:
        auto._answer(0, cpu)
        return None
    ticks = iter([tick for seconds in ROUND_TRIPS_S for tick in (0.0, seconds)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto.time, "perf_counter", lambda: next(ticks))
        seconds = auto._hop(1, 1 << 10, cpu)
    dist.send(torch.zeros(1, dtype=torch.int64), 1)
    return seconds


def test_a_transfer_takes_half_of_the_median_round_trip():
    assert run_ranks(asked, 2)[0] == 1.0
