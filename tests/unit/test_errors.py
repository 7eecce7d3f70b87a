"""What a failure says, and that it survives the way to another process."""

import pickle

import pytest

from lightning_parallel.errors import Failure, RemoteError, StageError


class NeedsTwo(Exception):
    """Pickles, but cannot be rebuilt from its one `args` entry."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


def test_the_text_names_stage_rank_work_error_and_the_ranks_that_stopped():
    error = Failure(1, 1, "the forward of micro-batch 2", ValueError("bad row")).to_error([0, 2, 3])
    assert str(error) == (
        "stage 1 (rank 1) failed in the forward of micro-batch 2: ValueError: bad row\n"
        "(rank 0, 2, 3 stopped because of it)"
    )
    assert (error.rank, error.stage) == (1, 1)


def test_a_rank_without_stage_and_many_stopped_ranks():
    text = str(Failure(5, error=KeyError("x")).to_error(range(6, 1030)))
    assert text.startswith("rank 5 failed: KeyError: 'x'\n(rank 6, 7,")
    assert text.endswith(", 20, 21, ... (1024 ranks) stopped because of it)")


def test_the_users_own_exception_is_the_cause_in_another_process():
    failure = Failure.from_bytes(Failure(0, 3, "on_fit_start", OSError(28, "disk full"), "Traceback ...").to_bytes())
    error = pickle.loads(pickle.dumps(failure.to_error([1])))
    assert type(error) is StageError
    assert type(error.__cause__) is OSError
    assert error.__cause__.errno == 28
    assert failure.error is not None
    assert failure.error.__notes__ == ["on rank 0:\nTraceback ..."]


@pytest.mark.parametrize("odd", [NeedsTwo("a", "b"), type("Local", (ValueError,), {})("a and b")])
def test_an_exception_that_cannot_travel_is_told_in_words(odd):
    failure = Failure.from_bytes(Failure(1, error=odd, traceback_text="Traceback of rank 1").to_bytes())
    assert isinstance(failure.error, RemoteError)
    assert str(failure.error) == f"{type(odd).__name__}: a and b"
    assert failure.error.traceback_text == "Traceback of rank 1"
    assert str(failure.to_error()) == f"rank 1 failed: {type(odd).__name__}: a and b"
    assert str(pickle.loads(pickle.dumps(failure.error))) == str(failure.error)
