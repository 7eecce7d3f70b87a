"""Memory that processes of one host share: payloads are written there, and only their place is sent.

The one idea: every process owns one slab, a file that it alone writes to and that others of the job map for reading; a
place is given back when the receiver says that it has copied. Files are for the owner only (mode 0600), in a folder of
mode 0700. Left out: several hosts.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

ALIGN = 64


class Slab:
    """A process's own shared memory, given out as a ring.

    Args:
        folder: of the job.
        owner: the process's address, which names the file.
        size: bytes.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> mine = Slab(Path(folder), "w1", 4096)
        >>> offset = mine.put(7, [torch.arange(3.0)])
        >>> SlabReader(Path(folder)).take("w1", offset, [torch.empty(3)])
        True
    """

    def __init__(self, folder: Path, owner: str, size: int) -> None:
        self.path, self.size = folder / f"slab.{owner}", size
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600))
        self.memory = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        self._used: OrderedDict[int, tuple[int, int]] = OrderedDict()  # number of message -> (start, end)

    def put(self, number: int, tensors: list[Tensor]) -> int | None:
        """Copy tensors in, one after the other; the place, or None if there is no room now."""
        raws = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        needed = sum(-raw.numel() // ALIGN * -ALIGN for raw in raws)
        start = self._place(needed)
        if start is None:
            return None
        at = start
        for raw in raws:
            self.memory[at : at + raw.numel()].copy_(raw)
            at += -raw.numel() // ALIGN * -ALIGN
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
        """The receiver has copied a message's tensors."""
        self._used.pop(number, None)

    def close(self) -> None:
        """Remove the file; who has mapped it keeps it until then."""
        self.path.unlink(missing_ok=True)


class SlabReader:
    """Other processes' slabs.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._mapped = folder, dict[str, Tensor]()

    def take(self, owner: str, offset: int, into: list[Tensor]) -> bool:
        """Copy tensors out of a slab; False if there is no such place."""
        memory = self._map(owner)
        needed = sum(-tensor.nbytes // ALIGN * -ALIGN for tensor in into)
        if memory is None or not 0 <= offset <= memory.numel() - needed:
            return False
        for tensor in into:
            tensor.view(torch.uint8).copy_(memory[offset : offset + tensor.nbytes])
            offset += -tensor.nbytes // ALIGN * -ALIGN
        return True

    def _map(self, owner: str) -> Tensor | None:
        if owner not in self._mapped:
            path = self.folder / f"slab.{owner}"
            if "/" in owner or not path.is_file():
                return None
            size = path.stat().st_size
            self._mapped[owner] = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._mapped[owner]
