"""What ``server_cpu.py`` compares the parameter server with: round trips of N bytes there, ``w += g``, N bytes back."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import zmq

from lightning_parallel.parameter_server import AddDelta, Asynchronous, Client, Layout, Manager, Rules, Server, wire
from lightning_parallel.parameter_server.messages import Message
from lightning_parallel.parameter_server.transport.frames import cut, view_bytes, whole

_fork = multiprocessing.get_context("fork")
Trip = Callable[[], None]


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill a buffer; False at the end of the stream."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            return False
        done += count
    return True


def serve_raw(port: int, size: int, asked: int, ready: object) -> None:
    torch.set_num_threads(1)
    weights, push = torch.zeros(size), torch.zeros(asked)
    with socket.create_server(("127.0.0.1", port)) as listener:
        ready.set()  # type: ignore[attr-defined]
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive(connection, view_bytes(push)):
            weights[:asked] += push
            connection.sendall(view_bytes(weights))


@contextmanager
def raw(port: int, size: int, asked: int | None = None) -> Iterator[Trip]:
    """One TCP socket, buffers that are there already; ``asked`` numbers there, ``size`` back."""
    asked = size if asked is None else asked
    ready = _fork.Event()
    process = _fork.Process(target=serve_raw, args=(port, size, asked, ready), daemon=True)
    process.start()
    ready.wait()
    push, pulled = torch.ones(asked), torch.zeros(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def trip() -> None:
            connection.sendall(view_bytes(push))
            receive(connection, view_bytes(pulled))

        yield trip
    process.join()


def gloo_rank(rank: int, port: int, size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def serve_gloo(port: int, size: int) -> None:
    torch.set_num_threads(1)
    gloo_rank(1, port, size)
    weights, push = torch.zeros(size), torch.zeros(size)
    while True:
        dist.recv(push, 0)
        weights += push
        dist.send(weights, 0)


@contextmanager
def gloo(port: int, size: int) -> Iterator[Trip]:
    """torch.distributed send and receive."""
    process = _fork.Process(target=serve_gloo, args=(port, size), daemon=True)
    process.start()
    gloo_rank(0, port, size)
    push, pulled = torch.ones(size), torch.zeros(size)

    def trip() -> None:
        dist.send(push, 1)
        dist.recv(pulled, 1)

    yield trip
    process.kill()
    process.join()


@contextmanager
def memcpy(size: int) -> Iterator[Trip]:
    """Two copies and the addition, in one process."""
    weights, push, landed, pulled = (torch.zeros(size) for _ in range(4))

    def trip() -> None:
        landed.copy_(push)
        weights.add_(landed)
        pulled.copy_(weights)

    yield trip


def serve_pyzmq(port: int, size: int, ready: object) -> None:
    weights, push = torch.zeros(size), torch.zeros(size)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        ready.set()  # type: ignore[attr-defined]
        while True:
            peer = router.recv()
            router.recv_into(view_bytes(push))
            weights += push
            router.send_multipart([peer, view_bytes(weights)])


@contextmanager
def pyzmq(port: int, size: int) -> Iterator[Trip]:
    """pyzmq alone, one message each way: its threads and nothing else."""
    ready = _fork.Event()
    process = _fork.Process(target=serve_pyzmq, args=(port, size, ready), daemon=True)
    process.start()
    ready.wait()
    push, pulled = torch.ones(size), torch.zeros(size)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{port}")

        def trip() -> None:
            dealer.send(view_bytes(push))
            dealer.recv_into(view_bytes(pulled))

        yield trip
    process.kill()
    process.join()


def carried(message: Message) -> Message:
    """A message to bytes and back."""
    ((_, frame),) = cut(message, 1, 1)
    content = frame[wire.HEADER.size :]
    return whole(wire.unpack_header(frame[: wire.HEADER.size], content), content, 1 << 30)


@contextmanager
def state_machines(size: int) -> Iterator[Trip]:
    """A worker's and a server's state machines and all bytes between them, in one process without sockets."""
    rules = Rules(Layout(size), AddDelta(), Asynchronous(), scale="sum", replicas=1)
    machines = {"manager": Manager(rules, 1, 1), "s": Server("s", rules), "w": Client("w", "w", rules)}
    client, push = machines["w"], torch.ones(size)

    def run(messages: list[Message]) -> None:
        while messages:
            messages += machines[messages[0].target].handle(carried(messages.pop(0)), 0.0)

    for machine in ("s", "w"):
        run(machines[machine].start(0.0))
    run(client.seed(torch.zeros(size)))
    run(client.pull(0.0))
    yield lambda: run(client.push_pull(push, 0.0, copy=False))
