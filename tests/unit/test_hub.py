"""The hub of workers: what it tells whom, in which order."""

import pickle
from multiprocessing import Pipe
from typing import cast

import pytest

from lightning_parallel.errors import Failure
from lightning_parallel.parameter_server.trainer.coordination.run_coordinator import RunCoordinator
from lightning_parallel.parameter_server.transport.sealed import AnyConnection


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_who_waits_hears_of_a_failure_and_not_that_the_others_have_come(failing: int):
    """The last one who is awaited fails: those who wait are all that are left, and have to hear why."""
    ends = [Pipe() for _ in range(3)]
    hub = RunCoordinator({cast(AnyConnection, ours): rank for rank, (ours, _) in enumerate(ends)})
    failure = Failure(failing, None, "teardown", ValueError("no"), "").to_bytes()
    for rank, (_, theirs) in enumerate(ends):
        if rank != failing:
            theirs.send_bytes(pickle.dumps(("meet", "the end of the run", pickle.dumps(None))))
            hub.turn(1.0)
    ends[failing][1].send_bytes(pickle.dumps((False, failure)))
    hub.turn(1.0)
    assert hub.failure == failure
    for rank, (_, theirs) in enumerate(ends):
        if rank != failing:
            assert pickle.loads(theirs.recv_bytes()) == ("failed", failure)
