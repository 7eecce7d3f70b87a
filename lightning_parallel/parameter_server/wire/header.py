"""The first bytes of every frame: what it is, of which job and message, how long, and a checksum."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

HEADER = struct.Struct("<4sBBHQQIIIQI")
MAGIC, VERSION = b"LPPS", 2
SLAB = 1  # flag: the payload lies in the sender's shared memory
MOST_META = 1 << 20

_BARE, _CRC = struct.Struct("<4sBBHQQIIIQ"), struct.Struct("<I")


class WireError(ValueError):
    """Bytes that are not a message."""


class Header(NamedTuple):
    """The fields of a header; magic, version and checksum are added and checked on the way."""

    op: int
    flags: int
    job: int
    number: int
    frame: int
    frames: int
    meta: int
    payload: int

    def pack(self, meta: bytes = b"") -> bytes:
        """The header's bytes, with the checksum of header and meta."""
        bare = _BARE.pack(MAGIC, VERSION, *self)
        return bare + _CRC.pack(zlib.crc32(meta, zlib.crc32(bare)))


def unpack_header(raw: bytes | memoryview, content: bytes | memoryview = b"") -> Header:
    """Read a header, and check it and the meta at the start of its frame.

    Raises:
        WireError: length, magic, version or checksum are wrong.
    """
    if len(raw) != HEADER.size:
        raise WireError(f"a header has {HEADER.size} bytes, got {len(raw)}")
    magic, version, *numbers, crc = HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError("not a frame of this protocol, or of another version of it")
    header = Header(*numbers)
    if header.meta > MOST_META:
        raise WireError("too much meta")
    if crc != zlib.crc32(content[: header.meta], zlib.crc32(raw[:-4])):
        raise WireError("the checksum is wrong")
    return header
