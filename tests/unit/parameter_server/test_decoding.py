"""Whatever the bytes are, decoding gives a message of the declared types or a ``WireError``."""

import random

import pytest

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server import wire
from lightning_parallel.parameter_server.transport.frames import whole
from lightning_parallel.parameter_server.wire import Header, WireError
from tests.unit.parameter_server.test_wire import BODIES

MORE = [m.Call(0, 1, ("axpy", 0.5, "g", 3, None, True)), m.Finished(1, 2, 0.5), m.Nack(0, "gap", 4)]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, left out, or put in."""
    out = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(out) + 1)
        kind = rng.randrange(3)
        if kind == 0 and place < len(out):
            out[place] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        elif kind == 1:
            del out[place : place + rng.randrange(1, 9)]
        else:
            out[place:place] = rng.randbytes(rng.randrange(1, 9))
    return bytes(out)


@pytest.mark.parametrize("body", BODIES + MORE, ids=lambda body: type(body).__name__)
def test_damaged_bytes_give_a_message_or_an_error(body):
    rng = random.Random(0)
    op, meta, tensors = wire.encode(m.Message("from", "to", 5, body))
    payload = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    refused = 0
    for _ in range(1500):
        changed = damaged(meta, rng)
        header = Header(op, 0, 7, 1, 0, 1, len(changed), len(payload))
        try:
            assert isinstance(whole(header, changed + payload, 1 << 20).body, type(body))
        except WireError:
            refused += 1
    assert refused > 0
