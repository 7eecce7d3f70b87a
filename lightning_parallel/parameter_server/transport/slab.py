"""Memory that processes of one host share: payloads are written there, and only their place is sent.

The one idea: every process owns one slab, a file that it alone writes to and that others of the job map for reading; a
place is given back when the receiver says that it needs it no more. A ring takes what is copied in; behind it lie
blocks for what is to be sent again and again, a range's weights, which are sent without a copy. Files are for the owner
only (mode 0600), in a folder of mode 0700. Left out: several hosts.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from lightning_parallel.parameter_server.transport.shared_files import take_room

ALIGN = 64


def _padded(size: int, to: int = ALIGN) -> int:
    return -size // to * -to


class Slab:
    """A process's own shared memory.

    Args:
        folder: of the job.
        owner: the process's address, which names the file.
        size: bytes of the ring.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> mine, others = Slab(folder, "w1", 4096), SlabReader(folder)
        >>> others.take("w1", mine.put(7, [torch.arange(3.0)]), [torch.empty(3)])
        True
        >>> weights = mine.zeros(2)
        >>> others.lend("w1", mine.put(8, [weights.add_(1)]), torch.float32, 2)
        tensor([1., 1.])
    """

    def __init__(self, folder: Path, owner: str, size: int) -> None:
        self.path, self.size = folder / f"slab.{owner}", size
        self._file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        self._end = _padded(size, mmap.ALLOCATIONGRANULARITY)
        take_room(self._file, 0, size, self.path)
        self.memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self._used: OrderedDict[int, tuple[int, int]] = OrderedDict()  # number of message -> (start, end) in the ring
        self._lent: dict[int, Tensor] = {}  # number of message -> what it shows of a block
        self._blocks: dict[int, int] = {}  # address in memory -> place in the file, of blocks in use
        self._spare: list[tuple[int, int]] = []  # (place, bytes) of blocks that nobody uses any more

    def zeros(self, length: int) -> Tensor:
        """A block of float32 zeros, which ``put`` sends without a copy; free again once no tensor shows it."""
        size = _padded(4 * length, mmap.ALLOCATIONGRANULARITY)
        place = next((place for place, spare in self._spare if spare == size), None)
        if place is None:
            place, self._end = self._end, self._end + size
            take_room(self._file, place, size, self.path)
        else:
            self._spare.remove((place, size))
        memory = mmap.mmap(self._file, size, offset=place)
        block = torch.frombuffer(memory, dtype=torch.float32, count=length).zero_()
        self._blocks[block.data_ptr()] = place
        weakref.finalize(memory, self._return, block.data_ptr(), place, size)
        return block

    def _return(self, address: int, place: int, size: int) -> None:
        del self._blocks[address]
        self._spare.append((place, size))

    def put(self, number: int, tensors: list[Tensor]) -> int | None:
        """Copy tensors in, one after the other; the place, or None if there is no room now."""
        if len(tensors) == 1 and (place := self._blocks.get(tensors[0].data_ptr())) is not None:
            self._lent[number] = tensors[0]
            return place
        needed = sum(_padded(tensor.nbytes) for tensor in tensors)
        start = self._place(needed)
        if start is None:
            return None
        at = start
        for tensor in tensors:
            self.memory[at : at + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
            at += _padded(tensor.nbytes)
        self._used[number] = (start, start + needed)
        return start

    def _place(self, needed: int) -> int | None:
        if not self._used:
            return 0 if needed <= self.size else None
        first, end = next(iter(self._used.values()))[0], next(reversed(self._used.values()))[1]
        if end > first:
            return end if end + needed <= self.size else 0 if needed < first else None
        return end if end + needed < first else None

    def free(self, number: int) -> None:
        """The receiver needs a message's tensors no more."""
        self._used.pop(number, None)
        self._lent.pop(number, None)

    def close(self) -> None:
        """Remove the file; who has mapped it keeps it until then."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


class SlabReader:
    """Other processes' slabs.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._mapped = folder, dict[str, Tensor]()

    def take(self, owner: str, place: int, into: list[Tensor]) -> bool:
        """Copy tensors out of a slab; False if there is no such place."""
        memory = self._map(owner, place, sum(_padded(tensor.nbytes) for tensor in into))
        if memory is None:
            return False
        for tensor in into:
            tensor.copy_(memory[place : place + tensor.nbytes].view(tensor.dtype))
            place += _padded(tensor.nbytes)
        return True

    def lend(self, owner: str, place: int, dtype: torch.dtype, length: int) -> Tensor | None:
        """A tensor where it lies, to be read only; None if there is no such place."""
        size = length * dtype.itemsize
        memory = self._map(owner, place, size)
        return None if memory is None else memory[place : place + size].view(dtype)

    def _map(self, owner: str, place: int, size: int) -> Tensor | None:
        """A slab's memory, if it has such a place."""
        memory = self._mapped.get(owner)
        if memory is None or place + size > memory.numel():
            memory = self._map_anew(owner)
        fits = memory is not None and 0 <= place <= memory.numel() - size
        return memory if fits else None

    def _map_anew(self, owner: str) -> Tensor | None:
        path = self.folder / f"slab.{owner}"
        if "/" in owner or not path.is_file():
            return None
        with open(path, "r+b") as file:
            self._mapped[owner] = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        return self._mapped[owner]

    def forget(self, owner: str) -> None:
        """A process is gone, and its memory is not needed here any more."""
        self._mapped.pop(owner, None)
