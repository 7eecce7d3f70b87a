"""Messages as bytes: a fixed header, values as their annotations say, raw buffers for tensors; nothing is unpickled.

    header   magic, version, op, flags, job, number of the message, frame, frames, bytes of meta and of payload, CRC-32
    meta     from, to, view, the fields of the body (``fields.py``)
    payload  the tensors' bytes, one after the other

The one idea: both sides know the classes of ``messages``, so their annotations are the format; what does not fit is a
``WireError``, whatever the bytes are. The CRC covers header and meta; payloads are TCP's business. Left out: who may
speak at all (``transport``).
"""

from lightning_parallel.parameter_server.wire.bodies import BODIES, decode, describe, encode, read
from lightning_parallel.parameter_server.wire.header import HEADER, MOST_META, SLAB, Header, WireError, unpack_header

__all__ = [
    "BODIES",
    "HEADER",
    "MOST_META",
    "SLAB",
    "Header",
    "WireError",
    "decode",
    "describe",
    "encode",
    "read",
    "unpack_header",
]
