"""Words for a log whose disk is full: which file, how much is free, how much was needed, what to do.

The one idea: the system says no more than that there is no space, and a server ends with it. Left out: what is done
about it; the log is whole up to its last record, and whoever starts the job again goes on from there.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def room_for_record(path: Path, size: Callable[[], int], remedy: str) -> Iterator[None]:
    """A context that writes to a log.

    Args:
        path: of the log.
        size: gives that of the record, bytes.
        remedy: where else the log could lie.

    Raises:
        OSError: the disk is full, there is a quota, or files may not be as large.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            error.errno,
            f"The log {path} could not be written: {os.strerror(error.errno)}. {path.parent} has {free / 2**20:.1f} MiB"
            f" free, and the record has {size() / 2**20:.3f} MiB. All before it is whole. Make room, or {remedy}; then"
            " start the job again.",
        ) from error
