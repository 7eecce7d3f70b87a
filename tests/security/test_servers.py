"""What strangers can do at servers' sockets on loopback TCP, and members that lie to their machines."""

import socket
import threading
from contextlib import suppress

import pytest
import zmq

from lightning_parallel.parameter_server import AddDelta, Layout, Rules, Server
from lightning_parallel.parameter_server.transport.inbox import REASONS
from lightning_parallel.parameter_server.transport.zeromq import Node

pytestmark = pytest.mark.timeout(60)
JOB = 0x1234567812345678


def greeting(mechanism: bytes) -> bytes:
    """The first bytes of ZMTP 3.0."""
    return b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def long_frame(content: bytes, flags: int) -> bytes:
    return bytes([flags | 2]) + len(content).to_bytes(8, "big") + content


def command(name: bytes, content: bytes) -> bytes:
    body = bytes([len(name)]) + name + content
    return b"\x04" + bytes([len(body)]) + body


READY = command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x02w1")
HELLO = command(b"HELLO", b"\x03job\x10" + b"0" * 16)
PART = long_frame(bytes(1 << 20), flags=1)


@pytest.fixture
def node():
    rules = Rules(Layout(4), AddDelta())
    found = Node(Server("s1", rules), JOB, "tcp://127.0.0.1:*", {})
    over = threading.Event()

    def pump():
        while not over.is_set():
            found.pump(0.05)

    thread = threading.Thread(target=pump)
    thread.start()
    yield found
    over.set()
    thread.join()
    found.close()


def address_of(node: Node) -> tuple[str, int]:
    return "127.0.0.1", int(node.endpoint.rpartition(":")[2])


@pytest.mark.parametrize(
    "said", [greeting(b"NULL") + READY, greeting(b"PLAIN") + HELLO, greeting(b"PLAIN") + READY, b"\x01\0"],
    ids=["without a password", "another password", "none", "ZMTP 1.0"],
)  # fmt: skip
def test_a_message_of_many_parts_is_not_taken_from_a_stranger(node, said):
    """ZeroMQ would keep all of its parts until the last."""
    with socket.create_connection(address_of(node), timeout=20) as stranger:
        taken = 0
        with suppress(ConnectionError):
            stranger.sendall(said)
            while taken < 256 << 20:
                stranger.sendall(PART)
                taken += len(PART)
    assert taken <= 16 << 20  # what the system's buffers hold


def test_who_knows_the_job_is_heard_and_others_are_not(node):
    with zmq.Context() as context:
        member, other = (context.socket(zmq.DEALER) for _ in range(2))
        member.plain_username, member.plain_password = b"job", f"{JOB:016x}".encode()
        other.plain_username, other.plain_password = b"job", b"0" * 16
        watched = other.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for end in (member, other):
            end.linger = 0
            end.connect(node.endpoint)
        heard = member.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        member.send(b"no message of ours")
        assert watched.poll(20_000)
        event = int.from_bytes(watched.recv_multipart()[0][:2], "little")
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        deadline = threading.Event()
        while not node.counts["refused"] and not deadline.wait(0.01):
            pass
        for end in (heard, watched, member, other):
            end.close(0)
    assert node.counts["refused"] == 1


def test_counts_of_refused_messages_do_not_grow_with_their_texts(node):
    for number in range(1000):
        node.inbox.refuse(f"a message of {number} bytes")
    assert len(node.counts) <= REASONS + 2
    assert node.counts["refused"] == 1000 == sum(node.counts.values()) // 2
