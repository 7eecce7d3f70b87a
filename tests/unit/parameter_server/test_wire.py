"""Bytes: every kind of message survives, everything else is refused, and a port that gets rubbish goes on."""

import random

import pytest
import torch
import zmq

from lightning_parallel.parameter_server import messages as m
from lightning_parallel.parameter_server import wire
from lightning_parallel.parameter_server.transport.frames import Assembly, cut, whole
from lightning_parallel.parameter_server.transport.slab import Slab, SlabReader
from lightning_parallel.parameter_server.transport.zeromq import Node
from lightning_parallel.parameter_server.wire import HEADER, Header, WireError

CODED = m.Coded("int8+sparse", 9, (torch.ones(2, dtype=torch.int8), torch.tensor([1, 8], dtype=torch.int32)), (0.5,))
ENTRY = m.Entry(3, CODED, 0.1, {1: (2, 3)}, 1, 0, None, (4,), (5, 6), 7, (8, 9))
BODIES = [
    m.View(3, {0: ("a", "b")}, {1: "c"}, {7: "w"}, {"a": "ipc://x"}),
    m.Push(0, 1, 2, 3, torch.arange(5.0), 4, 0.5),
    m.Push(0, 1, 2, 3),
    m.Rows(0, 1, CODED, {1: 2}, {1: 3}, 2, (9,)),
    m.At(0, 1, 2, {3: 4}),
    m.Append(0, ENTRY),
    m.Copy(0, {"lsn": 1}, {"weights": torch.zeros(3)}, {1: 2}, {1: 3}),
    m.Hello("worker", "w", "secret", "ipc://x", {0: 5}),
    m.Lease(),
]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (m.Coded, m.Entry, *wire.BODIES)):
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in a.__slots__)
    if isinstance(a, (tuple, dict)) and a and not isinstance(a, str):
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else ((a[k], b[k]) for k in a)
        return all(same(x, y) for x, y in pairs)
    return a == b


def opened(first: bytes) -> tuple[Header, bytes]:
    """Header and content of a frame 0."""
    content = first[HEADER.size :]
    return wire.unpack_header(first[: HEADER.size], content), content


def parts(frame: tuple) -> list[bytes]:
    """A frame as a socket sends it."""
    return [bytes(part) for part in frame if len(part)]


def assemble(frames) -> m.Message:
    (_, first), *rest = frames
    header, content = opened(first)
    if not rest:
        return whole(header, content, 1 << 30)
    assembly = Assembly(header, content, 1 << 30)
    for header, content in rest:
        assembly.place(wire.unpack_header(header))[:] = content
    assert assembly.is_whole
    return assembly.message()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_message_survives(body):
    message = m.Message("from", "to", 5, body)
    arrived = assemble(list(cut(message, job=1, number=1)))
    assert (arrived.source, arrived.target, arrived.view) == ("from", "to", 5)
    assert same(arrived.body, body)


def test_a_large_message_is_cut_to_a_megabyte():
    values = torch.randn(700_000)
    frames = list(cut(m.Message("a", "b", 0, m.Seed(0, values)), 1, 1))
    assert [len(content) for _, content in frames[1:]] == [1 << 20, 1 << 20, 2_800_000 - (2 << 20)]
    assert torch.equal(assemble(frames).body.values, values)


def test_what_is_announced_is_not_allocated_beyond_the_limit():
    for length, arrive in ((1000, whole), (100_000, Assembly)):
        (_, first), *_ = cut(m.Message("a", "b", 0, m.Seed(0, torch.zeros(length))), 1, 1)
        size = 4 * length
        with pytest.raises(WireError, match=f"a message of {size} bytes; at most {size - 1} are taken"):
            arrive(*opened(first), size - 1)


def test_values_that_are_not_those_of_a_message_are_refused():
    op, meta, _ = wire.encode(m.Message("a", "b", 0, m.At(1, 2, 3, {4: 5, 6: 7})))
    assert wire.decode(op, meta, []).body == m.At(1, 2, 3, {4: 5, 6: 7})
    for wrong in (meta[:-1], meta + b"?", meta[:5], b"", meta[:2] + b"\xff" + meta[3:]):
        with pytest.raises(WireError):
            wire.decode(op, wrong, [])
    for kind in (99, 255, *(other for other in range(len(wire.BODIES)) if wire.BODIES[other] is not m.At)):
        with pytest.raises(WireError):
            wire.decode(kind, meta, [])


def test_more_values_than_bytes_are_refused():
    op, meta, _ = wire.encode(m.Message("a", "b", 0, m.At(1, 2, 3, {})))
    with pytest.raises(WireError, match="more values than bytes"):
        wire.decode(op, meta[:-4] + (1 << 31).to_bytes(4, "little"), [])


def test_other_tensors_than_announced_are_refused():
    op, meta, _ = wire.encode(m.Message("a", "b", 0, m.Seed(0, torch.zeros(3))))
    for tensors in ([], [torch.zeros(4)], [torch.zeros(3, dtype=torch.float64)]):
        with pytest.raises(WireError, match="other tensors than announced"):
            wire.decode(op, meta, tensors)


class Deaf:
    """A machine that must never hear anything."""

    address, wake_at, view, heard = "deaf", None, m.View(), 0

    def handle(self, message, now):
        self.heard += 1
        return []

    def place(self, message):
        return None


def rubbish(rng: random.Random, job: int) -> list[bytes]:
    """Frames that are nearly right, or not at all."""
    frame = rng.choice(list(cut(m.Message("peer", "deaf", 0, rng.choice(BODIES)), job, rng.randrange(1, 1 << 40))))
    first, *rest = (bytearray(part) for part in parts(frame))
    kind = rng.randrange(7)
    if kind == 0:
        first[rng.randrange(HEADER.size)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        first = first[: rng.randrange(HEADER.size)]
    elif kind == 2:
        first, *rest = (bytearray(rng.randbytes(rng.randrange(200))) for _ in range(rng.randrange(1, 4)))
    elif kind == 3:
        rest.append(bytearray(b"more"))
    elif kind == 4:  # the meta is rubbish, and the checksum right
        meta = rng.randbytes(rng.randrange(80))
        first = bytearray(Header(rng.randrange(256), 0, job, 5, 0, 1, len(meta), 0).pack(meta) + meta)
    elif kind == 5:  # of another job
        first, *rest = parts(next(cut(m.Message("peer", "deaf", 0, m.Lease()), job + 1, 9)))
    else:  # in another's name
        first, *rest = parts(next(cut(m.Message("boss", "deaf", 0, m.Lease()), job, rng.randrange(1, 1 << 40))))
    return [bytes(part) for part in (first, *rest)]


def fuzz(frames: int) -> Node:
    """A port that gets so many frames of rubbish, over as many connections as it takes."""
    node, rng = Node(Deaf(), job=7, endpoint="tcp://127.0.0.1:*", book={}), random.Random(0)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.identity, peer.linger = b"peer", 0
        node.proof(node.endpoint).connect(peer)
        peer.connect(node.endpoint)
        for number in range(frames):
            peer.send_multipart(rubbish(rng, job=7))
            if number % 32 == 31:
                node.pump(0.01)
                while peer.poll(0):
                    peer.recv()
        for _ in range(50):
            node.pump(0.01)
        begin = dict(node.counts)
        peer.send_multipart(parts(next(cut(m.Message("peer", "deaf", 0, m.Lease()), 7, 1 << 62))))
        while not node.machine.heard:
            node.pump(0.1)
        assert begin["refused"] > 0.7 * frames  # the rest are whole first frames of a message that never goes on
        assert len(node.inbox.assemblies) <= 1
    context.term()
    return node


@pytest.mark.parametrize("frames", [3000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_port_that_gets_rubbish_goes_on(frames: int):
    node = fuzz(frames)
    assert node.machine.heard == 1
    node.close()


def test_a_message_that_came_before_is_refused():
    node, context = Node(Deaf(), job=7, endpoint="tcp://127.0.0.1:*", book={}), zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.identity, peer.linger = b"peer", 0
        node.proof(node.endpoint).connect(peer)
        peer.connect(node.endpoint)
        frame = parts(next(cut(m.Message("peer", "deaf", 0, m.Lease()), 7, 1)))
        peer.send_multipart(frame)
        peer.send_multipart(frame)
        while node.counts["refused"] < 1:
            node.pump(0.1)
    assert node.machine.heard == 1 and node.counts["refused: a message that came before"] == 1
    context.term()
    node.close()


def test_what_waits_for_a_dead_peer_is_bounded():
    node = Node(Deaf(), job=7, endpoint="tcp://127.0.0.1:*", book={"gone": "tcp://127.0.0.1:9"})
    values = torch.zeros(10)
    node.send([m.Message("deaf", "gone", 0, m.Seed(0, values)) for _ in range(1000)])
    assert len(node.links["gone"].queue) <= 256 and node.counts["dropped"] >= 1000 - 256 - 1
    node.close()


def test_shared_memory_is_given_out_and_taken_back(tmp_path):
    slab, reader = Slab(tmp_path, "me", 1024), SlabReader(tmp_path)
    places = {number: slab.put(number, [torch.full((64,), float(number))]) for number in range(4)}
    assert places == {0: 0, 1: 256, 2: 512, 3: 768} and slab.put(9, [torch.zeros(64)]) is None
    into = [torch.empty(64)]
    assert reader.take("me", 512, into) and into[0].eq(2.0).all()
    assert not reader.take("me", 900, into) and not reader.take("../me", 0, into) and not reader.take("you", 0, into)
    slab.free(0), slab.free(1)
    assert slab.put(10, [torch.zeros(32)]) == 0
    assert (slab.path.stat().st_mode & 0o777) == 0o600
    slab.close()


def test_weights_in_shared_memory_are_sent_from_where_they_lie_and_their_place_is_used_again(tmp_path):
    slab, reader = Slab(tmp_path, "me", 1024), SlabReader(tmp_path)
    weights, other = slab.zeros(5), slab.zeros(5)
    place = slab.put(1, [weights])
    assert slab.put(2, [other]) != place and slab.put(3, [torch.zeros(5)]) == 0
    lent = reader.lend("me", place, torch.float32, 5)
    weights.add_(2)
    assert lent.eq(2.0).all()  # no copy
    del weights
    assert slab.put(4, [slab.zeros(5)]) != place  # message 1 still shows it
    slab.free(1)
    assert slab.put(5, [slab.zeros(5)]) == place and lent.eq(0.0).all()
    slab.close()
