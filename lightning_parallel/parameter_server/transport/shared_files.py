"""Files that processes of one host share: room is taken when they are made, and what dead jobs left is removed.

The one idea: a page of a full file system that is written to through a mapping ends the process by a signal, without a
word; so the room is asked for while an error can still say what is full. And a job's folder is locked for as long as
one of its processes lives, however they end, so that whoever comes later knows whose folders nobody needs any more.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "server-"
IN_MEMORY = Path("/dev/shm")
_LOCK = "lock"
_SOCKET = 107  # bytes that the path of a socket may have (unix(7))
_OF_A_JOB = len(f"/{PREFIX}01234567/0123456789")
_log = logging.getLogger(__name__)


def take_room(file: int, start: int, size: int, path: Path) -> None:
    """Have room for so many bytes of a file, from a place on.

    Raises:
        OSError: there is none; the text says where.
    """
    try:
        os.posix_fallocate(file, start, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC, f"{path.parent.parent} has no room for {size / 2**20:.1f} MiB of memory shared by processes"
        ) from error


def say_no_room(error: OSError) -> None:
    """Without shared memory the job goes on by its sockets."""
    if error.errno != errno.ENOSPC:
        raise error
    _log.warning(f"{error.strerror}: weights go through sockets. Remove what is there, or enlarge it.")


def temporary(room: int) -> Path:
    """The folder for temporary files, or /tmp where the path of a socket in it would be too long.

    Args:
        room: bytes of what follows the folder in a socket's path.
    """
    found = Path(tempfile.gettempdir())
    return found if len(os.fsencode(found)) + room <= _SOCKET else Path("/tmp")


def make_folder() -> tuple[Path, int]:
    """A folder for one job, which only this user may enter, and the lock on it; forked processes hold it too."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary(_OF_A_JOB)))
    os.chmod(folder, 0o700)
    return folder, _locked(folder)


def in_memory(name: str) -> tuple[Path, int] | None:
    """A folder that no disk stands behind, and the lock on it, where the system has such."""
    if not os.access(IN_MEMORY, os.W_OK):
        return None
    folder = IN_MEMORY / name
    try:
        folder.mkdir(mode=0o700)
        return folder, _locked(folder)
    except OSError as error:
        say_no_room(error)
        return None


def _locked(folder: Path) -> int:
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def sweep() -> None:
    """Remove folders of this user's jobs of which no process lives, as after a SIGKILL of all."""
    places = (temporary(_OF_A_JOB), IN_MEMORY)
    for lock in [lock for place in places for lock in place.glob(f"{PREFIX}*/{_LOCK}")]:
        with suppress(OSError):
            if lock.stat().st_uid != os.getuid():
                continue
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(file)


def remove(folder: Path) -> None:
    """Remove a job's folder, and the one in memory."""
    shutil.rmtree(IN_MEMORY / folder.name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
