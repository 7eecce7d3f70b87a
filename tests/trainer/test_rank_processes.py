"""The processes of ranks that a process forks."""

import multiprocessing
import os
import pickle
import re
import signal
import threading
from multiprocessing.connection import Connection

import pytest

from lightning_parallel.errors import StageError
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
