"""Values of a device on the host, without waiting for what was launched behind them.

The one idea: `tensor.item()` waits for everything the host has launched. Here the moment at which the tensor was made
is marked, and its copy waits, on a stream of its own, for that moment only: while a step's last backwards run, the host
learns the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel.pipeline.transport.channel import Waiting, nobody_waits


class Readback:
    """The values of a tensor that has just been made (launched) on the current stream.

    Args:
        tensor: on the host or a CUDA device; not written to until `wait` has returned.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._made = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait(self, waiting: Waiting = nobody_waits) -> Tensor:
        """The tensor on the host; of a device's, a copy. `waiting`: a context entered while the host is blocked."""
        if self._made is None:
            return self._tensor
        copy = torch.empty_like(self._tensor, device="cpu", pin_memory=True)
        stream = torch.cuda.Stream(self._tensor.device)
        stream.wait_event(self._made)
        with torch.cuda.stream(stream), waiting("the device to end the step's forwards"):
            copy.copy_(self._tensor, non_blocking=True)
            stream.synchronize()
        return copy
