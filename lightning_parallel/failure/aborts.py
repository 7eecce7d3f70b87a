"""What frees a main thread that waits for a rank that will never answer, and how such waiting looks when it ends.

The one idea: closing connections under a blocked call ends it with an error. Left out: when to (``watch.py``).
"""

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
import torch.distributed as dist


def shut(connections: Iterable[tuple[int, str]]) -> None:
    """Shut connections, given by descriptor; not listeners, without which gloo aborts."""
    for descriptor, _ in connections:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def abort_device_groups() -> None:
    """Abort the NCCL communicators of all process groups, so that a host that waits for the device is freed."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(Exception):
            group._get_backend(torch.device("cuda")).abort()


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception is what a failure of another rank looks like from here."""
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
