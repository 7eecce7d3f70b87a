"""A server's ranges on disk: a snapshot of each, and every entry after it, so that a restart of everything resumes.

The one idea: an entry is written before it is applied; what can be read again, in order and whole, is the range's
history. A snapshot is a range at one place of it. An entry that was cut off by the end of a process is the last one,
and is left out. Files hold the bytes of ``wire``; nothing is unpickled. Left out: disks that lie about what they have
written (``sync`` asks the system to write before an entry counts).
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server import wire
from lightning_parallel.parameter_server.full_disk import room_for_record
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.server.history import Memory, Range
from lightning_parallel.parameter_server.server.server import Server
from lightning_parallel.parameter_server.transport.frames import view_bytes
from lightning_parallel.parameter_server.wire import WireError

MAGIC = b"LPPSLOG2"  # how every file begins; the last is the version of what follows
_RECORD = struct.Struct("<BIQI")  # op, bytes of meta, bytes of tensors, CRC-32 of both


class Storage:
    """The files of one server.

    Args:
        folder: for this server alone; made if it is not there.
        rules: the job's agreement.
        snapshot_every: entries of a range after which its log begins anew with a snapshot.
        sync: wait for the disk at every entry.
        memory: where the weights of ranges lie that are read.
    """

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        snapshot_every: int = 1000,
        sync: bool = False,
        memory: Memory = torch.zeros,
    ) -> None:
        self.folder, self.rules, self.snapshot_every, self.sync = folder, rules, snapshot_every, sync
        self.memory = memory
        folder.mkdir(parents=True, exist_ok=True)
        self.server: Server | None = None
        self._logs: dict[int, BinaryIO] = {}
        self._ends: dict[int, int] = {}  # key -> lsn up to which the files go
        self._starts: dict[int, int] = {}  # key -> lsn of the snapshot
        self._size = 0  # of the last record, bytes

    def watch(self, server: Server) -> None:
        """Take snapshots of this server's ranges."""
        self.server = server

    def read(self) -> dict[int, Range]:
        """The ranges as they were; what is not whole at the end of a log is cut off.

        Raises:
            ValueError: a file is not a log of this version.
        """
        found = {}
        for path in sorted(self.folder.glob("range-*.log")):
            key = int(path.stem.removeprefix("range-"))
            part = self._read(key, path)
            if part is not None:
                found[key] = part
        return found

    def append(self, key: int, entry: m.Entry) -> None:
        """Write an entry that is about to be applied.

        Raises:
            OSError: the disk is full; with the path, sizes and a remedy.
        """
        part = self._part(key)
        with room_for_record(self._path(key), lambda: self._size, "give launch(log=) a folder of another disk"):
            if self._ends.get(key) != entry.lsn - 1 or entry.lsn - self._starts[key] > self.snapshot_every:
                self._snapshot(key, part)
            self._write(self._logs[key], m.Append(key, entry))
        self._ends[key] = entry.lsn

    def _path(self, key: int) -> Path:
        return self.folder / f"range-{key}.log"

    def _part(self, key: int) -> Range:
        replica = self.server.replicas.get(key) if self.server is not None else None
        if replica is not None:
            return replica.part
        return Range(key, self.rules.layout.length(key), self.rules.update)

    def _snapshot(self, key: int, part: Range) -> None:
        """Begin a range's log anew with all of it; the old one is there until the new one is whole."""
        path = self._path(key)
        if key in self._logs:
            self._logs.pop(key).close()
        with open(path.with_suffix(".new"), "wb") as file:
            file.write(MAGIC)
            self._write(file, part.copy())
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".new"), path)
        self._logs[key] = open(path, "ab", buffering=0)  # noqa: SIM115, it stays open
        self._starts[key] = self._ends[key] = part.lsn

    def _write(self, file: BinaryIO, body: m.Copy | m.Append) -> None:
        op, meta, tensors = wire.encode(m.Message("", "", 0, body))
        raws = [view_bytes(tensor) for tensor in tensors]
        crc = zlib.crc32(meta)
        for raw in raws:
            crc = zlib.crc32(raw, crc)
        left = memoryview(_RECORD.pack(op, len(meta), sum(map(len, raws)), crc) + meta + b"".join(raws))
        self._size = len(left)
        while left:  # a disk that is nearly full takes a part, and refuses the rest
            left = left[file.write(left) :]
        if self.sync:
            os.fsync(file.fileno())

    def _read(self, key: int, path: Path) -> Range | None:
        part: Range | None = None
        with open(path, "r+b") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(
                    f"{path} is not a log of this version of the parameter server. Resume with the version that wrote "
                    f"it, or use another folder."
                )
            whole = file.tell()
            while (body := _read_record(file)) is not None:
                if isinstance(body, m.Copy):
                    part = Range.of(body, self.rules.update, self.memory)
                elif part is not None and body.entry.lsn == part.lsn + 1:
                    part.apply(body.entry)
                whole = file.tell()
            file.truncate(whole)
        return part

    def close(self) -> None:
        """Close the files."""
        for file in self._logs.values():
            file.close()
        self._logs.clear()


def _read_record(file: BinaryIO) -> m.Copy | m.Append | None:
    """The next record, or None where no whole one follows."""
    raw = file.read(_RECORD.size)
    if len(raw) < _RECORD.size:
        return None
    op, meta_bytes, payload_bytes, crc = _RECORD.unpack(raw)
    meta, payload = file.read(meta_bytes), file.read(payload_bytes)
    if len(meta) < meta_bytes or len(payload) < payload_bytes or zlib.crc32(payload, zlib.crc32(meta)) != crc:
        return None
    try:
        body = wire.decode(op, meta, _tensors(op, meta, payload)).body
    except WireError:
        return None
    return body if isinstance(body, (m.Copy, m.Append)) else None


def _tensors(op: int, meta: bytes, payload: bytes) -> list[Tensor]:
    tensors, at = [], 0
    for dtype, length in wire.describe(op, meta)[1]:
        tensor = torch.empty(length, dtype=dtype)
        size = length * dtype.itemsize
        view_bytes(tensor)[:] = payload[at : at + size]
        tensors.append(tensor)
        at += size
    return tensors
