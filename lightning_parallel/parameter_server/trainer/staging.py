"""Gradients on their way from a worker's device to the host, and weights on their way back.

The one idea: tensors are packed on the device, so that one copy goes each way, between pinned memory and the device, on
a stream of its own: what the device still computes is not waited for on the way in, and on the way out the host waits
once. On a CPU nothing is copied. Left out: what is packed (``parameter_server/table.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_parallel.parameter_server.table import Group, Table


class Staging:
    """Between a worker's device and the host.

    Args:
        table: of the optimizer's parameters.
        device: where they are.
    """

    def __init__(self, table: Table, device: torch.device) -> None:
        self.table, self.device = table, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def memory(self, size: int) -> Tensor:
        """Host memory for so many float32 numbers; torch keeps what was pinned for the next one."""
        return torch.empty(size, pin_memory=self._stream is not None)

    def out(self, packed: Tensor) -> Tensor:
        """A packed vector of the device on the host, once it is there."""
        if self._stream is None:
            return packed.cpu()
        host = self.memory(packed.numel())
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
        packed.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def pack(self, groups: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """One float32 vector on the device."""
        return self.table.pack(groups, self.device)

    def into(self, vector: Tensor, groups: Sequence[Group]) -> None:
        """Copy a packed vector of the host into parameters; the host does not wait for it."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            host = vector if vector.is_pinned() else vector.pin_memory()
            with torch.cuda.stream(self._stream):
                vector = host.to(self.device, non_blocking=True)
            current.wait_stream(self._stream)
            vector.record_stream(current)
        self.table.copy_into(vector, groups)
