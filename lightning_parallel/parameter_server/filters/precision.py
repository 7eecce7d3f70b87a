"""Number formats of what is sent: one small class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Precision:
    """A number format. ``encode`` and ``decode`` are each other's inverse up to its rounding."""

    name: ClassVar[str] = ""

    def encode(self, values: Tensor) -> tuple[Tensor, Numbers]:
        """The values in this format, and the numbers that decoding needs."""
        raise NotImplementedError

    def decode(self, coded: Tensor, numbers: Numbers) -> Tensor:
        """float32 values."""
        del numbers
        return coded.to(torch.float32)


@dataclass(frozen=True)
class Float32(Precision):
    """As it is, 4 bytes an element."""

    name: ClassVar[str] = "fp32"

    def encode(self, values: Tensor) -> tuple[Tensor, Numbers]:
        return values, ()


@dataclass(frozen=True)
class Float16(Precision):
    """IEEE half, 2 bytes an element; values beyond 65504 are sent as that and the rest stays behind."""

    name: ClassVar[str] = "fp16"

    def encode(self, values: Tensor) -> tuple[Tensor, Numbers]:
        most = torch.finfo(torch.float16).max
        return values.clamp(-most, most).to(torch.float16), ()


@dataclass(frozen=True)
class BFloat16(Precision):
    """bfloat16, 2 bytes an element, the range of float32."""

    name: ClassVar[str] = "bf16"

    def encode(self, values: Tensor) -> tuple[Tensor, Numbers]:
        return values.to(torch.bfloat16), ()


@dataclass(frozen=True)
class Int8(Precision):
    """127 steps up and down to the largest magnitude, 1 byte an element; off by half a step at most.

    Example:
        >>> coded, numbers = Int8().encode(torch.tensor([1.0, -0.5, 0.0]))
        >>> coded.tolist(), [round(number, 6) for number in numbers]
        ([127, -64, 0], [0.007874])
    """

    name: ClassVar[str] = "int8"

    def encode(self, values: Tensor) -> tuple[Tensor, Numbers]:
        step = float(values.abs().max()) / 127 if values.numel() else 0.0
        if step == 0.0:
            return torch.zeros_like(values, dtype=torch.int8), (0.0,)
        return (values / step).round_().clamp_(-127, 127).to(torch.int8), (step,)

    def decode(self, coded: Tensor, numbers: Numbers) -> Tensor:
        return coded.to(torch.float32).mul_(numbers[0])


PRECISIONS: dict[str, Precision] = {p.name: p for p in (Float32(), Float16(), BFloat16(), Int8())}
