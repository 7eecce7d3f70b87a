"""Boards: the tail of a small range shows it in memory that readers of the same host look at; nobody is asked.

    tail     lock odd, view, least clock, pushes in it, weights, lock even      after every entry that is with all
    reader   lock, all of it, lock again: the same even number, or it is read once more

The one idea: what a tail would answer lies open, so a read costs a look and a copy, and no message. A board says of
itself in which view, at which clock and with which pushes it was shown, and a reader takes it only if a tail would have
answered that; else it asks. One that its server has not marked for a lease is the board of a dead one, and is not
looked at. Files are for the owner only (mode 0600), in a folder of mode 0700; what lies in them is checked like what
comes from a socket. Left out: large ranges, several hosts, processors that reorder stores.

Source:
    Lameter, Effective Synchronization on Linux/NUMA Systems, 2005, section 3.3 (sequence locks);
    Dragojevic et al., FaRM: Fast Remote Memory, NSDI 2014, section 4 (reads that no server answers).
"""

from __future__ import annotations

import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_parallel.parameter_server.layout import Layout
from lightning_parallel.parameter_server.messages import Rows, View
from lightning_parallel.parameter_server.server.chain import NoBoard
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.transport.shared_files import take_room
from lightning_parallel.parameter_server.worker.reading import Shown

LARGEST = 1 << 16  # bytes of a range above which no board shows it
WORKERS = 128  # that a board has room for
TRIES = 3  # looks at a range that changes meanwhile
HEAD = 4  # words before the workers: lock, view, least clock, how many workers; one that is gone is shown as ~worker
_SLOT = 8 * (HEAD + 2 * WORKERS)  # bytes before a range's weights
_STAMP = 8  # bytes at the beginning: when the server was last there, nanoseconds


def has_boards() -> bool:
    """Whether this processor shows stores in their order to others."""
    return platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class BoardPlaces:
    """Where the ranges of a table lie on a board; key -> bytes from its beginning to the range's words."""

    starts: dict[int, int]
    size: int

    @classmethod
    def of(cls, layout: Layout) -> BoardPlaces:
        """Of all ranges that are small enough."""
        starts, at = dict[int, int](), _STAMP
        for key in range(layout.num_ranges):
            if 4 * layout.length(key) <= LARGEST:
                starts[key] = at
                at += _SLOT + 4 * layout.length(key) + -4 * layout.length(key) % 8
        return cls(starts, at)


class Board(NoBoard):
    """What a server shows to the readers of its host.

    Args:
        folder: of the job.
        owner: the server's address, which names the file.
        layout: the job's table.

    Example:
        >>> import tempfile
        >>> from lightning_parallel.parameter_server.messages import Entry
        >>> from lightning_parallel.parameter_server.updates import AddDelta
        >>> folder, layout, part = Path(tempfile.mkdtemp()), Layout(2), Range(0, 2, AddDelta())
        >>> part.apply(Entry(1, seed=torch.ones(2), joined=(5,), view=3))
        >>> board, view = Board(folder, "s", layout), View(3, {0: ("s",)})
        >>> board.stamp(7.0)
        >>> board.show(0, 3, part)
        >>> vector, rows = Boards(folder, layout, lease=10.0).look(view, now=8.0)
        >>> vector, rows[0].seqs, rows[0].minimum
        (tensor([1., 1.]), {5: 0}, 0)
    """

    def __init__(self, folder: Path, owner: str, layout: Layout) -> None:
        self.path, self.places = folder / f"board.{owner}", BoardPlaces.of(layout)
        file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        try:
            take_room(file, 0, self.places.size, self.path)
            memory = mmap.mmap(file, self.places.size)
        except OSError:
            self.close()
            raise
        finally:
            os.close(file)
        self._words, self._slots = memoryview(memory).cast("q"), dict[int, Tensor]()
        for key, start in self.places.starts.items():
            at, count = start + _SLOT, layout.length(key)
            self._slots[key] = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=at)

    def stamp(self, now: float) -> None:
        self._words[0] = int(now * 1e9)

    def show(self, key: int, view: int, part: Range | None) -> None:
        start = self.places.starts.get(key)
        if start is None:
            return
        words, at = self._words, start // 8
        words[at] += 1
        if part is None or len(part.seqs) > WORKERS:
            words[at + 1] = 0
        else:
            words[at + 1], words[at + 2], words[at + 3] = view, part.clocks.minimum, len(part.seqs)
            at_worker = at + HEAD
            for worker, seq in part.seqs.items():
                words[at_worker], words[at_worker + 1] = ~worker if worker in part.left else worker, seq
                at_worker += 2
            self._slots[key].copy_(part.weights)
        words[at] += 1

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


class BoardPlace(NamedTuple):
    """Where a range is shown: its tail's board as words and as bytes, its first word there, its bytes in the whole."""

    words: memoryview
    raw: memoryview
    at: int
    bounds: tuple[int, int]


class Boards:
    """Other processes' boards.

    Args:
        folder: of the job.
        layout: its table.
        lease: seconds after which a server that was not there is not believed.
    """

    def __init__(self, folder: Path, layout: Layout, lease: float) -> None:
        self.folder, self.layout, self.lease = folder, layout, lease
        self.places = BoardPlaces.of(layout)
        self._view = -1
        self._ranges: list[BoardPlace] | None = None

    def look(self, view: View, now: float) -> Shown | None:
        """All ranges as their tails show them, one vector and what each range holds; None if one does not.

        Args:
            view: in which the reader is.
            now: seconds, of the host's clock.
        """
        if view.number != self._view:
            self._view, self._ranges = view.number, self._find(view)
        if self._ranges is None:
            return None
        whole, rows, oldest = bytearray(4 * self.layout.size), dict[int, Rows](), int((now - self.lease) * 1e9)
        vector = torch.frombuffer(whole, dtype=torch.float32)
        for key, (place, values) in enumerate(zip(self._ranges, self.layout.split(vector), strict=True)):
            if place.words[0] <= oldest:
                return None
            shown = self._range(place, memoryview(whole))
            if shown is None:
                return None
            flat, minimum = shown
            seqs = {worker if worker >= 0 else ~worker: seq for worker, seq in zip(flat[::2], flat[1::2], strict=True)}
            left = tuple([~worker for worker in flat[::2] if worker < 0])
            rows[key] = Rows(key, 0, values, seqs, {}, minimum, left)
        return vector, rows

    def _range(self, place: BoardPlace, whole: memoryview) -> tuple[list[int], int] | None:
        """One range, copied to where it belongs: workers and their pushes, the least clock."""
        words, at, (start, end) = place.words, place.at, place.bounds
        weights = 8 * at + _SLOT
        for _ in range(TRIES):
            lock, view, minimum, count = words[at : at + HEAD].tolist()
            if lock % 2 or view != self._view or not 0 <= count <= WORKERS:
                continue
            flat = words[at + HEAD : at + HEAD + 2 * count].tolist()
            whole[start:end] = place.raw[weights : weights + end - start]
            if words[at] == lock:
                return flat, minimum
        return None

    def _find(self, view: View) -> list[BoardPlace] | None:
        """The places of all ranges, or None if one has none."""
        maps, found = dict[str, memoryview | None](), []
        for key, (start, end) in enumerate(self.layout.bounds):
            tail, place = view.chains.get(key, ("",))[-1], self.places.starts.get(key)
            if tail not in maps:
                maps[tail] = self._map(tail)
            raw = maps[tail]
            if raw is None or place is None:
                return None
            found.append(BoardPlace(raw.cast("q"), raw, place // 8, (4 * start, 4 * end)))
        return found

    def _map(self, owner: str) -> memoryview | None:
        path = self.folder / f"board.{owner}"
        if not owner or "/" in owner or not path.is_file() or path.stat().st_size != self.places.size:
            return None
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
