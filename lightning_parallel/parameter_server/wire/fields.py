"""How one field of a message becomes bytes and comes back: a codec for each annotation, made once.

    int, int, ...    8 bytes each, packed together
    X | Y | None     a byte for which one, then that
    tuple, dict      how many, then one after the other
    a class          its fields, one after the other
    others           see ``plain.py``

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

from torch import Tensor

from lightning_parallel.parameter_server.wire.plain import COUNT, PLAIN, Codec, Put, Source, Take, read_count


@cache
def codec(hint: Any) -> Codec:
    """Puts a value of a type into bytes, and takes it out again."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
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
        out += COUNT.pack(len(value))
        for item in value:
            one[0](item, out, tensors)

    def take(raw: bytes, at: int, source: Source) -> tuple[Any, int]:
        count, at, values = read_count(raw, at), at + 4, []
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
