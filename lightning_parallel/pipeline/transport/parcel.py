"""A Python value with tensors in it, on its way from one rank's device to another's over the host.

The one idea: the tensors are taken out while the value is pickled, wherever they lie in it, and travel as one run of
bytes. On a CUDA device these are copied by a stream that waits for their making only (`readback`), so that packing
waits for nothing that was launched later. Left out: sparse and quantized tensors and subclasses, which pickle as they
do.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.transport.channel import AnyChannel, Waiting, nobody_waits
from lightning_parallel.pipeline.transport.payload import to_bytes
from lightning_parallel.pipeline.transport.readback import Readback

_ALIGN = 16  # bytes; a tensor is read where its number type may lie


class Parcel:
    """A value, packed on the device where its tensors are.

    Args:
        value: anything that pickles; not written to until it is sent.
        device: where its tensors are gathered.

    Raises:
        TypeError: it does not pickle.

    Example:
        >>> parcel = Parcel({"loss": torch.tensor(2.0), "names": ["a"]}, torch.device("cpu"))
        >>> unpack(parcel.taken(), torch.device("cpu"))
        {'loss': tensor(2.), 'names': ['a']}
    """

    def __init__(self, value: Any, device: torch.device) -> None:
        tensors: list[Tensor] = []
        file = io.BytesIO()
        try:
            _Packer(file, tensors).dump(value)
        except Exception as error:
            raise TypeError(
                f"A value that another rank needs cannot be sent to it: {type(error).__name__}: {error}. Return, log"
                " and give to metrics only what pickles: tensors, numbers, strings, lists, dicts, objects of named"
                " classes."
            ) from error
        self._frame = file.getvalue()
        self._bytes = Readback(_gather([tensor.to(device) for tensor in tensors], device))

    def taken(self, waiting: Waiting = nobody_waits) -> tuple[bytes, bytes]:
        """What travels; `waiting`: a context entered while the host waits for the device."""
        return self._frame, self._bytes.wait(waiting).numpy().tobytes()

    def send(self, channel: AnyChannel, waiting: Waiting = nobody_waits) -> None:
        """Send it; `unpack` of what the other end receives gives the value."""
        channel.send_object(self.taken(waiting))


def unpack(taken: tuple[bytes, bytes], device: torch.device) -> Any:
    """The value, its tensors on a device: views of one piece of memory."""
    frame, payload = taken
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    return _Unpacker(io.BytesIO(frame), flat.to(device)).load()


class _Packer(pickle.Pickler):
    """Leaves the tensors out, and where each will lie in their place."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors, self._end = tensors, 0
        self._places: dict[int, tuple[int, torch.dtype, tuple[int, ...]]] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = (self._end, value.dtype, tuple(value.shape))
            self._tensors.append(value)
            self._end += _padded(value.numel() * value.element_size())
        return self._places[id(value)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, flat: Tensor) -> None:
        super().__init__(file)
        self._flat = flat

    def persistent_load(self, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
        begin, dtype, shape = place
        size = dtype.itemsize * torch.Size(shape).numel()
        return self._flat[begin : begin + size].view(dtype).view(shape)


def _gather(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The bytes of tensors, one after another, each begun at a multiple of `_ALIGN`."""
    parts = [torch.empty(0, dtype=torch.uint8, device=device)]
    for tensor in tensors:
        parts.append(to_bytes(tensor))
        gap = _padded(parts[-1].numel()) - parts[-1].numel()
        if gap:
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=device))
    return torch.cat(parts)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
