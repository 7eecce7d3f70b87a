"""How one field of a message becomes bytes and comes back: a codec for each annotation, made once.

    int              8 bytes; neighbours are packed together
    float, str       8 bytes; length and UTF-8
    X | None         a byte, then X
    tuple, dict      how many, then one after the other
    Tensor           type and length; its bytes travel behind the meta
    Any              a letter for the type, then a plain value

The one idea: the annotation is the schema, so no byte on the wire says what type a value has, and what is read is of
the right type or is refused. Left out: what the fields are of (``bodies.py``).
"""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
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
_COUNT, _INT, _FLOAT, _TENSOR = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<BQ")

Source = Callable[[torch.dtype, int], Any]  # gives the tensor that a message announces
Put = Callable[[Any, bytearray, list[Tensor]], None]
Take = Callable[[bytes, int, Source], tuple[Any, int]]
Codec = tuple[Put, Take]


@cache
def codec(hint: Any) -> Codec:
    """Puts a value of a type into bytes, and takes it out again."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is tuple:
        return _many(codec(args[0])) if args[-1] is Ellipsis else _pair(args)
    if origin is dict:
        return _map(args)
    assert isinstance(hint, type) and is_dataclass(hint), f"no codec for {hint}"
    return record(hint)


@cache
def record(kind: Any) -> Codec:
    """All fields of a class, one after the other; integers that follow one another at once."""
    hints = typing.get_type_hints(kind)
    names, parts = [field.name for field in fields(kind)], list[tuple[Callable[[Any], Any], Put, Take, bool]]()
    while names:
        run = next((i for i, name in enumerate(names) if hints[name] is not int), len(names))
        if run > 1:
            parts.append((attrgetter(*names[:run]), *_ints(run), True))
        else:
            parts.append((attrgetter(names[0]), *codec(hints[names[0]]), False))
        names = names[max(run, 1) :]

    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        for get, put_one, _, _ in parts:
            put_one(get(value), out, tensors)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        values = list[Any]()
        for _, _, take_one, several in parts:
            value, at = take_one(raw, at, source)
            if several:
                values += value
            else:
                values.append(value)
        return kind(*values), at

    return put, take


@cache
def _ints(count: int) -> Codec:
    layout = struct.Struct(f"<{count}q")
    pack, unpack, size = layout.pack, layout.unpack_from, layout.size

    def put(values: Any, out: bytearray, tensors: list[Tensor]) -> None:
        out += pack(*values)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        return unpack(raw, at), at + size

    return put, take


def _scalar(layout: struct.Struct) -> Codec:
    pack, unpack, size = layout.pack, layout.unpack_from, layout.size

    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        out += pack(value)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        return unpack(raw, at)[0], at + size

    return put, take


def _put_text(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    raw = value.encode()
    out += _COUNT.pack(len(raw)) + raw


def _take_text(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    size = _count(raw, at)
    return raw[at + 4 : at + 4 + size].decode(), at + 4 + size


def _put_tensor(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    out += _TENSOR.pack(_CODES[value.dtype], value.numel())
    plain = value.dim() == 1 and value.is_contiguous() and not value.requires_grad
    tensors.append(value if plain else value.detach().reshape(-1).contiguous())


def _take_tensor(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    code, length = _TENSOR.unpack_from(raw, at)
    return source(DTYPES[code], length), at + _TENSOR.size


def _count(raw: bytes, at: int) -> int:
    count: int = _COUNT.unpack_from(raw, at)[0]
    if count > len(raw) - at - 4:
        raise ValueError("more values than bytes")
    return count


def _union(args: tuple[Any, ...]) -> Codec:
    """Which of the types, in a byte, then the value; 255 is None."""
    choices = [arg for arg in args if arg is not type(None)]
    classes = [(float, int) if arg is float else typing.get_origin(arg) or arg for arg in choices]
    codecs, optional = [codec(arg) for arg in choices], len(choices) < len(args)

    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        if value is None:
            out.append(255)
            return
        place = next(i for i, one in enumerate(classes) if isinstance(value, one))
        out.append(place)
        codecs[place][0](value, out, tensors)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        place = raw[at]
        if place == 255 and optional:
            return None, at + 1
        return codecs[place][1](raw, at + 1, source)

    return put, take


def _pair(args: tuple[Any, ...]) -> Codec:
    codecs = [codec(arg) for arg in args]

    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        for (put_one, _), item in zip(codecs, value, strict=True):
            put_one(item, out, tensors)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        values = []
        for _, take_one in codecs:
            value, at = take_one(raw, at, source)
            values.append(value)
        return tuple(values), at

    return put, take


def _many(one: Codec) -> Codec:
    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        out += _COUNT.pack(len(value))
        for item in value:
            one[0](item, out, tensors)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        count, at, values = _count(raw, at), at + 4, []
        for _ in range(count):
            value, at = one[1](raw, at, source)
            values.append(value)
        return tuple(values), at

    return put, take


def _map(args: tuple[Any, ...]) -> Codec:
    put_items, take_items = _many(_pair(args))

    def put(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
        put_items(value.items(), out, tensors)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        items, at = take_items(raw, at, source)
        return dict(items), at

    return put, take


def _put_counts(value: Any, out: bytearray, tensors: list[Tensor]) -> None:
    flat = [number for pair in value.items() for number in pair]
    out += _COUNT.pack(len(flat)) + struct.pack(f"<{len(flat)}q", *flat)


def _take_counts(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
    count = _count(raw, at)
    flat = struct.unpack_from(f"<{count}q", raw, at + 4)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at + 4 + 8 * count


_LETTERS: dict[type, tuple[bytes, Codec]] = {
    type(None): (b"N", (lambda value, out, tensors: None, lambda raw, at, source: (None, at))),
    bool: (b"b", _scalar(struct.Struct("<?"))),
    int: (b"i", _scalar(_INT)),
    float: (b"f", _scalar(_FLOAT)),
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


_PLAIN: dict[Any, Codec] = {
    int: _scalar(_INT),
    float: _scalar(_FLOAT),
    str: (_put_text, _take_text),
    Tensor: (_put_tensor, _take_tensor),
    dict[int, int]: (_put_counts, _take_counts),
    Any: (_put_any, _take_any),
}
