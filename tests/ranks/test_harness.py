"""The harness itself: results in order, the first failure shown, nobody left behind."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.harness import rank_outcomes, run_ranks


def test_results_come_back_in_rank_order() -> None:
    def add(rank: int, offset: int) -> torch.Tensor:
        total = torch.tensor([float(rank + offset)])
        dist.all_reduce(total)
        return total + rank

    assert [value.item() for value in run_ranks(add, 3, 1)] == [6.0, 7.0, 8.0]


def test_the_first_failure_is_raised_not_its_echo() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("the cause")
        dist.barrier()

    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(fail, 2)
    assert "rank 1 failed first" in caught.value.__notes__[0]


def test_a_killed_rank_is_told_from_one_that_raised() -> None:
    outcomes = rank_outcomes(lambda rank: os.kill(os.getpid(), signal.SIGKILL) if rank else rank, 2, group=False)
    assert outcomes[0].returned and not outcomes[1].returned
    assert outcomes[1].error is None and outcomes[1].exitcode == -signal.SIGKILL


def test_a_hanging_rank_shows_its_stack() -> None:
    def hang(rank: int) -> None:
        if rank == 0:
            threading.Event().wait()

    with pytest.raises(TimeoutError, match="in hang"):
        run_ranks(hang, 2, timeout=3.0, group=False)  # long enough for the ranks to begin
