"""The processes of ranks that a process forks."""

import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection

from lightning_parallel.trainer.rank_processes import RankProcesses


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
