"""What a manager must not forget, and the log that it goes on from when it is started again.

The one idea: all that the manager knows is small, so a record of the log is all of it; the last whole one counts. It is
on disk before anybody is told. Left out: leases, which begin anew, and who has which portion in hand (a helper
sends its result until it is counted).
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from lightning_parallel.parameter_server.full_disk import room_for_record
from lightning_parallel.parameter_server.manager.sharing import Progress
from lightning_parallel.parameter_server.messages import View
from lightning_parallel.parameter_server.wire.fields import record

_RECORD = struct.Struct("<II")  # bytes, CRC-32
ANEW_AFTER = 1 << 20  # bytes after which the log begins anew


@dataclass(frozen=True, slots=True)
class Member:
    """A process that the manager knows."""

    role: str
    name: str
    endpoint: str = ""
    worker: int | None = None
    holds: dict[int, int] = field(default_factory=dict)  # key -> lsn, what a server brought from a log
    host: str = ""


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part, as of one moment: the view, the members by address, who is gone, worker numbers given out; and
    how far the batch in hand is."""

    view: View = field(default_factory=View)
    members: dict[str, Member] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    workers: int = 0
    progress: Progress = field(default_factory=Progress)


_PUT, _TAKE = record(Roster)


class RosterLog:
    """A manager's log.

    Args:
        path: of the file; made if it is not there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "manager.log"
        >>> RosterLog(path).append(Roster(gone=("w1",), workers=3))
        >>> RosterLog(path).read() == Roster(gone=("w1",), workers=3)
        True
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, roster: Roster) -> None:
        """Write a record, and wait for the disk.

        Raises:
            OSError: the disk is full; with the path, sizes and a remedy.
        """
        out, tensors = bytearray(), list[Tensor]()
        _PUT(roster, out, tensors)
        raw = _RECORD.pack(len(out), zlib.crc32(out)) + out
        with room_for_record(self.path, lambda: len(raw), "set TMPDIR to a folder of another disk"):
            if self.path.exists() and self.path.stat().st_size < ANEW_AFTER:
                _write(self.path, raw, "ab")
            else:
                _write(self.path.with_suffix(".new"), raw, "wb")
                os.replace(self.path.with_suffix(".new"), self.path)

    def read(self) -> Roster | None:
        """The last record that is whole, or None; what follows it is cut off."""
        found, end, raw = None, 0, self.path.read_bytes() if self.path.exists() else b""
        while len(raw) - end >= _RECORD.size:
            size, crc = _RECORD.unpack_from(raw, end)
            content = raw[end + _RECORD.size : end + _RECORD.size + size]
            if len(content) < size or zlib.crc32(content) != crc:
                break
            found, end = content, end + _RECORD.size + size
        if end < len(raw):
            os.truncate(self.path, end)
        return None if found is None else _TAKE(found, 0, lambda dtype, length: None)[0]


def _write(path: Path, raw: bytes, mode: str) -> None:
    with open(path, mode) as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
