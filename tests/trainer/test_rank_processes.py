"""The processes of ranks that a process forks."""

import multiprocessing
import os
import pickle
import re
import signal
import threading
from multiprocessing.connection import Connection

import pytest

from lightning_parallel.errors import Failure, StageError
from lightning_parallel.trainer.launch.rank_processes import RankProcesses


def wait(*_: object) -> None:
    threading.Event().wait(20.0)


def runs(pipe: Connection) -> None:
    pipe.send("it runs")
    wait()


def test_sigterm_ends_what_was_forked_while_ranks_run():
    """It inherits the handler that ends the ranks, which are not its own."""
    ranks = RankProcesses("fork", 1, wait, ())
    try:
        with ranks.forwarded_sigterm():
            context = multiprocessing.get_context("fork")
            heard, said = context.Pipe(False)
            server = context.Process(target=runs, args=(said,))
            server.start()
            heard.recv()
            server.terminate()
            server.join(10.0)
            assert server.exitcode == -signal.SIGTERM
            assert ranks.processes[0].is_alive()
            ranks.processes[0].kill()
    finally:
        ranks.end()


def leaves(rank: int, code: int, pipe: Connection) -> None:
    if rank == 1 and code < 0:
        os.kill(os.getpid(), -code)
    if rank == 1:
        os._exit(code)
    pipe.send_bytes(pickle.dumps((True, "an answer")))


@pytest.mark.parametrize(
    ("code", "hint"), [(3, "exit code 3"), (0, "exit code 0"), (-9, "SIGKILL: the out-of-memory killer?")]
)
def test_a_rank_that_ends_without_an_answer_is_named_with_what_its_exit_code_says(code: int, hint: str):
    ranks = RankProcesses("fork", 2, leaves, (code,))
    try:
        with pytest.raises(StageError, match=re.escape(f"lost rank 1: its process ended ({hint})")):
            ranks.wait(5.0)
    finally:
        ranks.end()
    assert [process.exitcode for process in ranks.processes] == [0, code]


class NoLuck(RuntimeError):
    """The user's own, with words that a broken connection has too."""

    def __init__(self, peer: str, code: int) -> None:
        super().__init__(f"{peer}: Broken pipe, says NCCL")
        self.code = code


ECHO = RuntimeError("gloo: Connection closed by peer")


class OneByOne(RankProcesses):
    """Has the last rank end when the end of the other one is known here.

    Args:
        told: what ranks tell that they have failed of.
        ends: their exit codes; below 0 a signal.
        last: the rank that awaits the other.
    """

    def __init__(self, told: dict[int, BaseException], ends: dict[int, int], last: int) -> None:
        self._awaited, self._known = os.pipe()
        super().__init__("fork", 2, tells, (told, ends, last, self._awaited))

    def _read(self, pipe: Connection, rank: int) -> bool:
        returned = super()._read(pipe, rank)
        os.write(self._known, b".")
        return returned

    def end(self) -> None:
        super().end()
        os.close(self._awaited)
        os.close(self._known)


def tells(
    rank: int, told: dict[int, BaseException], ends: dict[int, int], last: int, awaited: int, pipe: Connection
) -> None:
    if rank == last:
        os.read(awaited, 1)
    if rank in told:
        pipe.send_bytes(pickle.dumps((False, Failure(rank, None, "training_step", told[rank]).to_bytes())))
    if ends[rank] < 0:
        os.kill(os.getpid(), -ends[rank])
    os._exit(ends[rank])


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("code", [1, -9, -11], ids=["ends", "is killed behind it", "crashes behind it"])
def test_a_class_of_the_user_s_own_is_raised_whatever_it_says_and_whatever_ends_its_rank(code: int, last: int):
    ranks = OneByOne({0: ECHO, 1: NoLuck("db", 7)}, {0: 1, 1: code}, last)
    try:
        with pytest.raises(NoLuck, match="db: Broken pipe") as caught:
            ranks.wait(5.0)
    finally:
        ranks.end()
    assert caught.value.code == 7
    assert caught.value.__notes__[-1].startswith("rank 1 failed in training_step")


@pytest.mark.parametrize(
    ("told", "ends", "hint"),
    [
        ({0: ECHO}, {0: -15, 1: -9}, "SIGKILL: the out-of-memory killer?"),
        ({}, {0: 1, 1: 3}, "exit code 3"),
        ({}, {0: -9, 1: -11}, "SIGSEGV"),
    ],
    ids=["the other was killed behind its word", "both leave", "both are killed"],
)
def test_of_ranks_that_end_the_first_without_a_word_is_named(told: dict, ends: dict[int, int], hint: str):
    ranks = OneByOne(told, ends, 0)
    try:
        with pytest.raises(StageError, match=re.escape(f"lost rank 1: its process ended ({hint})")):
            ranks.wait(5.0)
    finally:
        ranks.end()
