"""What frees a main thread that waits for a rank that will never answer, and how such waiting looks when it ends.

The one idea: closing connections under a blocked call ends it with an error. Left out: when to (``failure/watch.py``).
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from lightning_parallel.failure.processes import open_sockets

_RAISE_OF_CONNECTIONS = ("builtins", "torch", "lightning_parallel")  # packages whose errors may be of a connection


class Connections:
    """The connections of this process's groups. A gloo group has no way to abort a receive; this is one."""

    def __init__(self) -> None:
        self._opened: set[tuple[int, str]] = set()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """A context in which groups are made."""
        before = open_sockets()
        try:
            yield
        finally:
            self._opened |= open_sockets() - before

    def shut(self) -> None:
        """Shut those that are still open; not listeners, without which gloo aborts."""
        for descriptor, _ in self._opened & open_sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a process that was forked: they are another's."""
        self._opened.clear()


def abort_device_groups() -> None:
    """Abort the NCCL communicators of all process groups, so that a host that waits for the device is freed."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(Exception):
            group._get_backend(torch.device("cuda")).abort()


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception is what a failure of another rank looks like from here; a class of the user's own never is.

    Example:
        >>> is_communication_error(RuntimeError("NCCL error")), is_communication_error(ValueError("NCCL error"))
        (True, False)
    """
    if type(error).__module__.partition(".")[0] not in _RAISE_OF_CONNECTIONS:
        return False
    text = str(error)
    signs = (
        "gloo",
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
        "NCCL",
    )
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    )


def quietly(function: Callable[[], object]) -> None:
    """Call a function, whatever becomes of it."""
    with suppress(Exception):
        function()
