"""Processes that no rank waits for: children of nobody, which end by themselves once the run does.

The one idea: such a process is forked twice, and keeps no line of the rank that forked it, since a line ends when
nobody holds it any more.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from lightning_parallel.parameter_server.transport.sealed import AnyConnection

open_lines: set[AnyConnection] = set()  # of this process


def detach(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process of its own, and return at once."""
    process = multiprocessing.get_context("fork").Process(target=_fork_again, args=(function, *arguments))
    process.start()
    process.join()


def _fork_again(function: Callable[..., None], *arguments: Any) -> None:
    if os.fork() == 0:
        for connection in open_lines:
            connection.close()
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
