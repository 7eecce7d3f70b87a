"""Values that are not made of others, as bytes: numbers, text, tensors, and plain values of any kind.

    int          8 bytes
    float, str   8 bytes; length and UTF-8
    Tensor       type and length; its bytes travel behind the meta
    {int: int}   how many, then 8 bytes each
    Any          a letter for the type, then the value

The one idea: a codec is a pair of functions, ``put`` appends a value to bytes, ``take`` reads it at a place and says
where the next one begins. Left out: values that are made of others (``fields.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float64,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
COUNT, _INT, _FLOAT, _TENSOR = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<BQ")

Source = Callable[[torch.dtype, int], Any]  # gives the tensor that a message announces
Put = Callable[[Any, bytearray, list[Tensor]], None]
Take = Callable[[bytes, int, Source], tuple[Any, int]]
Codec = tuple[Put, Take]


def scalar(layout: struct.Struct) -> Codec:
    """How one value of a fixed layout is written and read."""
    pack, unpack, size = layout.pack, layout.unpack_from, layout.size

    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        out += pack(value)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        return unpack(raw, at)[0], at + size

    return put, take


def _put_text(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    raw = value.encode()
    out += COUNT.pack(len(raw)) + raw


def _take_text(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    size = read_count(raw, at)
    return raw[at + 4 : at + 4 + size].decode(), at + 4 + size


def _put_tensor(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    out += _TENSOR.pack(_CODES[value.dtype], value.numel())
    plain = value.dim() == 1 and value.is_contiguous() and not value.requires_grad
    tensors.append(value if plain else value.detach().reshape(-1).contiguous())


def _take_tensor(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    code, length = _TENSOR.unpack_from(raw, at)
    return source(DTYPES[code], length), at + _TENSOR.size


def read_count(raw: bytes, at: int) -> int:
    """The number of values that follow.

    Raises:
        ValueError: it is above the number of bytes that follow.
    """
    count: int = COUNT.unpack_from(raw, at)[0]
    if count > len(raw) - at - 4:
        raise ValueError("more values than bytes")
    return count


def _put_counts(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    flat = [number for pair in value.items() for number in pair]
    out += COUNT.pack(len(flat)) + struct.pack(f"<{len(flat)}q", *flat)


def _take_counts(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    count = read_count(raw, at)
    flat = struct.unpack_from(f"<{count}q", raw, at + 4)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at + 4 + 8 * count


_LETTERS: dict[type, tuple[bytes, Codec]] = {
    type(None): (b"N", (lambda value, out, tensors: None, lambda raw, at, source: (None, at))),
    bool: (b"b", scalar(struct.Struct("<?"))),
    int: (b"i", scalar(_INT)),
    float: (b"f", scalar(_FLOAT)),
    str: (b"s", (_put_text, _take_text)),
}
_BY_LETTER = {letter[0]: one for letter, one in _LETTERS.values()}


def _put_any(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    if type(value) not in _LETTERS:
        raise TypeError(f"cannot send a {type(value).__name__}")
    letter, one = _LETTERS[type(value)]
    out += letter
    one[0](value, out, tensors)


def _take_any(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    if raw[at] not in _BY_LETTER:
        raise ValueError(f"no such letter {raw[at]}")
    return _BY_LETTER[raw[at]][1](raw, at + 1, source)


PLAIN: dict[Any, Codec] = {
    int: scalar(_INT),
    float: scalar(_FLOAT),
    str: (_put_text, _take_text),
    Tensor: (_put_tensor, _take_tensor),
    dict[int, int]: (_put_counts, _take_counts),
    Any: (_put_any, _take_any),
}
