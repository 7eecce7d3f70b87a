"""What a failure says, and that it survives the way to another process."""

import dataclasses
import pickle
import threading

import pytest

from lightning_parallel.errors import Failure, RemoteError, StageError, add_note, notes_of
from tests.harness import run_ranks


class NeedsTwo(Exception):
    """Pickles, but cannot be rebuilt from its one `args` entry."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")
        self.left = left


class SaysItTwice(ValueError):
    """Can be rebuilt from its `args`, as another text."""

    def __init__(self, text, code=0):
        super().__init__(f"{text} ({code})")
        self.code = code


class FullDisk(OSError):
    """Builtin, with arguments of its own."""

    def __init__(self, path):
        super().__init__(28, "disk full", path)
        self.path = path


class HoldsALock(RuntimeError):
    """Carries what does not pickle."""

    def __init__(self, lock):
        super().__init__("locked", lock)
        self.lock = lock


class Large(Exception):
    """Carries more than a message does."""

    def __init__(self):
        super().__init__("large")
        self.rows = bytes(1 << 21)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Lets no attribute be set."""

    text: str


class Unprintable(Exception):
    def __str__(self):
        raise AttributeError("never")


def sent(failure):
    return Failure.from_bytes(failure.to_bytes())


def test_a_note_names_stage_rank_work_and_the_ranks_that_stopped():
    user = ValueError("bad row")
    assert Failure(1, 1, "the forward of micro-batch 2", user).to_error([0, 2, 3]) is user
    assert user.__notes__ == [
        "stage 1 (rank 1) failed in the forward of micro-batch 2\n(rank 0, 2, 3 stopped because of it)"
    ]
    assert user.args == ("bad row",)


def test_a_rank_without_stage_and_many_stopped_ranks():
    [text] = Failure(5, error=KeyError("x")).to_error(range(6, 1030)).__notes__
    assert text.startswith("rank 5 failed\n(rank 6, 7,")
    assert text.endswith(", 20, 21, ... (1024 ranks) stopped because of it)")


def test_a_lost_rank_has_no_exception_of_the_users():
    error = Failure(1, 0, headline="lost rank 1 (stage 0): its process ended").to_error([0])
    assert type(error) is StageError
    assert str(error) == "lost rank 1 (stage 0): its process ended\n(rank 0 stopped because of it)"
    assert (error.rank, error.stage, error.lost_rank) == (1, 0, 1)


def test_the_users_own_exception_is_raised_in_another_process():
    error = sent(Failure(0, 3, "on_fit_start", OSError(28, "disk full"), "Traceback ...")).to_error([1])
    assert type(error) is OSError
    assert error.errno == 28
    assert error.__notes__ == [
        "on rank 0:\nTraceback ...",
        "stage 3 (rank 0) failed in on_fit_start\n(rank 1 stopped because of it)",
    ]


@pytest.mark.parametrize(
    ("user", "same"),
    [
        (NeedsTwo("a", "b"), {"left": "a"}),
        (SaysItTwice("a", 3), {"code": 3}),
        (FullDisk("/x"), {"path": "/x", "errno": 28, "filename": "/x"}),
        (HoldsALock(threading.Lock()), {}),
        (Large(), {}),
        (Frozen("a"), {"text": "a"}),
        (KeyError("a"), {}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), {"object": b"\xff"}),
        (type("Local", (ValueError,), {})("a and b"), {}),
        (StopIteration(7), {"value": 7}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_is_rebuilt_of_its_own_class(user, same):
    error = sent(Failure(1, error=user)).to_error([0])
    assert type(error) is type(user)
    assert error is not user
    assert str(error) == str(user)
    assert {name: getattr(error, name) for name in same} == same
    assert error.__notes__ == ["rank 1 failed\n(rank 0 stopped because of it)"]


def test_a_class_that_cannot_be_printed_is_rebuilt_too():
    error = sent(Failure(1, error=Unprintable("x"))).to_error()
    assert type(error) is Unprintable
    assert error.args == ("x",)


def test_its_cause_and_its_notes_come_along():
    user = NeedsTwo("a", "b")
    add_note(user, "the user's own note")
    user.__cause__ = FullDisk("/x")
    error = sent(Failure(1, error=user)).to_error()
    assert type(error.__cause__) is FullDisk
    assert notes_of(error) == ["the user's own note", "rank 1 failed"]


def raises_what_the_parent_lacks(rank):
    return Failure(1, error=type("Elsewhere", (ValueError,), {})("a and b"), traceback_text="of rank 1").to_bytes()


def test_a_class_that_is_not_here_is_told_in_words():
    [blob] = run_ranks(raises_what_the_parent_lacks, 1, group=False)
    failure = Failure.from_bytes(blob)
    assert isinstance(failure.error, RemoteError)
    error = failure.to_error([0])
    assert type(error) is StageError
    assert str(error) == "rank 1 failed: Elsewhere: a and b\n(rank 0 stopped because of it)"
    assert failure.error.traceback_text == "of rank 1"
    assert str(pickle.loads(pickle.dumps(error)).__cause__) == "Elsewhere: a and b"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_one_process_does_not_end_another_as_if_all_were_well(kind):
    user = kind()
    assert Failure(1, error=user).to_error([0], is_own=True) is user
    error = sent(Failure(1, where="fit", error=user)).to_error([0])
    assert type(error) is StageError
    assert str(error) == f"rank 1 failed in fit: {kind.__name__}\n(rank 0 stopped because of it)"
    assert type(error.__cause__) is kind
