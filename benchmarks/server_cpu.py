"""What the parameter server's transports cost beside a raw socket, gloo and memcpy, all in one run.

    python benchmarks/server_cpu.py [--megabytes 64] [--passes 5] [--port 15600]

A round trip is: push N bytes, the server does ``w += g``, pull N bytes. Passes of all variants take turns, and the
least time of each is shown with its ratio to the raw TCP socket of the same run. Then: a 4 kB round trip, shards,
workers, replicas.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from lightning_parallel.server import AddDelta, Asynchronous, Layout, Rules
from lightning_parallel.server.launcher import launch
from lightning_parallel.server.transport.frames import view_bytes
from lightning_parallel.server.transport.memory import keep_freed_memory

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


def serve_raw(port: int, size: int, ready: object) -> None:
    torch.set_num_threads(1)
    weights, push = torch.zeros(size), torch.zeros(size)
    with socket.create_server(("127.0.0.1", port)) as listener:
        ready.set()  # type: ignore[attr-defined]
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive(connection, view_bytes(push)):
            weights += push
            connection.sendall(view_bytes(weights))


@contextmanager
def raw(port: int, size: int) -> Iterator[Trip]:
    """One TCP socket, buffers that are there already."""
    ready = _fork.Event()
    process = _fork.Process(target=serve_raw, args=(port, size, ready), daemon=True)
    process.start()
    ready.wait()
    push, pulled = torch.ones(size), torch.zeros(size)
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


@contextmanager
def ours(
    size: int, servers: int = 1, ranges: int = 1, replicas: int = 1, host: str = "", port: int = 0, slab: bool = False
) -> Iterator[Trip]:
    """This package: a session's push and pull."""
    rules = Rules(Layout(size, ranges), AddDelta(), Asynchronous(), scale="sum", replicas=replicas, lease=60.0)
    slab_bytes = 4 * size * 3 + (1 << 20) if slab else 0
    with launch(rules, servers, 1, host=host, port=port, slab_bytes=slab_bytes) as started:
        session = started.job.join("w").start(torch.zeros(size))
        session.pull()
        push = torch.ones(size)

        def trip() -> None:
            session.push(push, copy=False)
            session.pull()

        yield trip
        session.close()


def least(trips: dict[str, Trip], passes: int, repeats: int = 1) -> dict[str, float]:
    """Least seconds of a trip, the variants taking turns."""
    best = dict.fromkeys(trips, float("inf"))
    for _ in range(passes + 1):
        for name, trip in trips.items():
            for _ in range(repeats):
                start = time.perf_counter()
                trip()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def table(title: str, seconds: dict[str, float], base: str, bars: dict[str, float]) -> None:
    print(f"\n{title}")
    for name, value in seconds.items():
        ratio = value / seconds[base]
        bar = f"  bar {bars[name]} {'met' if ratio <= bars[name] else 'MISSED'}" if name in bars else ""
        print(f"  {name:24s} {1e3 * value:9.3f} ms  x {ratio:6.2f}{bar}", flush=True)


def crowd(size: int, workers: int) -> float:
    """Seconds of a round trip of every one of several workers at once."""
    rules = Rules(Layout(size), AddDelta(), Asynchronous(), scale="sum", replicas=1, lease=60.0)
    with launch(rules, 1, workers) as started:
        pipes = [_fork.Pipe() for _ in range(workers)]
        members = [_fork.Process(target=member, args=(started.job, i, size, pipes[i][1])) for i in range(workers)]
        for process in members:
            process.start()
        times = [ours.recv() for ours, _ in pipes]
        for process in members:
            process.join()
    return max(times)


def member(job: object, index: int, size: int, pipe: object, trips: int = 5) -> None:
    torch.set_num_threads(1)
    session = job.join(f"w{index}").start(torch.zeros(size))  # type: ignore[attr-defined]
    session.pull()
    push, start = torch.ones(size), time.perf_counter()
    for _ in range(trips):
        session.push(push, copy=False)
        session.pull()
    pipe.send((time.perf_counter() - start) / trips)  # type: ignore[attr-defined]
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--port", type=int, default=15600)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    port, size = args.port, args.megabytes * (1 << 20) // 4
    with ExitStack() as stack:
        enter = stack.enter_context
        trips = {
            "raw TCP socket": enter(raw(port, size)),
            "memcpy": enter(memcpy(size)),
            "pyzmq, tcp": enter(ours(size, host="127.0.0.1", port=port + 2)),
            "pyzmq, ipc": enter(ours(size)),
            "shared memory": enter(ours(size, slab=True)),
            "gloo": enter(gloo(port + 1, size)),
        }
        bars = {"pyzmq, tcp": 1.25, "shared memory": 0.65}
        table(f"{args.megabytes} MB push and pull", least(trips, args.passes), "raw TCP socket", bars)
    with ExitStack() as stack:
        enter = stack.enter_context
        trips = {
            "raw TCP socket": enter(raw(port + 3, 1024)),
            "pyzmq, tcp": enter(ours(1024, host="127.0.0.1", port=port + 4)),
        }
        table("4 kB push and pull", least(trips, args.passes, 200), "raw TCP socket", {"pyzmq, tcp": 2.0})
    for title, options in {
        "shards": {f"{n} shards": {"servers": n, "ranges": n} for n in (1, 2, 4)},
        "replicas": {f"{n} replicas": {"servers": n, "replicas": n} for n in (1, 2, 3)},
    }.items():
        with ExitStack() as stack:
            trips = {name: stack.enter_context(ours(size // 4, **one)) for name, one in options.items()}
            table(f"{title}, {args.megabytes // 4} MB, ipc", least(trips, args.passes), next(iter(trips)), {})
    sizes = {f"{args.megabytes // d} MB": size // d for d in (16, 8, 4)}
    for title, seconds in {
        "workers at once, 4 MB, ipc": {f"{n} workers": crowd(1 << 20, n) for n in (1, 2, 4)},
        "bytes, 1 worker, ipc": {name: crowd(one, 1) for name, one in sizes.items()},
    }.items():
        table(title, seconds, next(iter(seconds)), {})


if __name__ == "__main__":
    main()
