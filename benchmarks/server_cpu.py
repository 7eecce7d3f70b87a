"""What the parameter server's transports cost beside a raw socket, gloo and memcpy, all in one run.

    python benchmarks/server_cpu.py [--megabytes 64] [--passes 5] [--port 15600]

A round trip is: push N bytes, the server does ``w += g``, pull N bytes. Passes of all variants take turns; least time
and median of each are shown with their ratios to the first row of the same run, the raw TCP socket. Then: a 4 kB round
trip and what it is made of, a 4 kB pull, shards, workers, replicas.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from server_peers import Trip, gloo, memcpy, pyzmq, raw, state_machines

from lightning_parallel.parameter_server import AddDelta, Asynchronous, Layout, Rules
from lightning_parallel.parameter_server.launcher import launch
from lightning_parallel.parameter_server.transport.memory import keep_freed_memory

_fork = multiprocessing.get_context("fork")


@contextmanager
def ours(
    size: int,
    servers: int = 1,
    ranges: int = 1,
    replicas: int = 1,
    host: str = "",
    port: int = 0,
    slab: bool = False,
    trip: str = "push_pull",
) -> Iterator[Trip]:
    """This package: a session's push and pull."""
    rules = Rules(Layout(size, ranges), AddDelta(), Asynchronous(), scale="sum", replicas=replicas, lease=60.0)
    slab_bytes = 4 * size * 3 + (1 << 20) if slab else 0
    with launch(rules, servers, 1, host=host, port=port, slab_bytes=slab_bytes) as started:
        session = started.job.join("w").start(torch.zeros(size))
        session.pull()
        push = torch.ones(size)
        trips = {"push_pull": lambda: session.push_pull(push, copy=False), "pull": session.pull}
        yield trips[trip]  # type: ignore[misc]
        session.close()


Times = dict[str, list[float]]


def timed(trips: dict[str, Trip], passes: int, repeats: int = 1) -> Times:
    """Seconds of every trip, the variants taking turns; the first pass is not counted."""
    times: Times = {name: [] for name in trips}
    for index in range(passes + 1):
        for name, trip in trips.items():
            for _ in range(repeats):
                start = time.perf_counter()
                trip()
                times[name] += [time.perf_counter() - start] if index else []
    return times


def table(title: str, times: Times, bars: dict[str, float] | None = None) -> None:
    print(f"\n{title:28s}      least            median")
    base = next(iter(times.values()))
    for name, values in times.items():
        least, median = min(values), statistics.median(values)
        ratios = least / min(base), median / statistics.median(base)
        bar = (bars or {}).get(name)
        said = "" if bar is None else f"  wanted {bar}: {' and '.join(_verdict(ratio, bar) for ratio in ratios)}"
        print(
            f"  {name:24s} {1e3 * least:9.3f} ms x {ratios[0]:5.2f} {1e3 * median:9.3f} ms x {ratios[1]:5.2f}{said}",
            flush=True,
        )


def _verdict(ratio: float, bar: float) -> str:
    return "met" if ratio <= bar else "MISSED"


def crowd(size: int, workers: int) -> list[float]:
    """Seconds of round trips of several workers at once, but for the last of each, when others may be done."""
    rules = Rules(Layout(size), AddDelta(), Asynchronous(), scale="sum", replicas=1, lease=60.0)
    with launch(rules, 1, workers) as started:
        pipes = [_fork.Pipe() for _ in range(workers)]
        members = [_fork.Process(target=member, args=(started.job, i, size, pipes[i][1])) for i in range(workers)]
        for process in members:
            process.start()
        times = [seconds for ours, _ in pipes for seconds in ours.recv()]
        for process in members:
            process.join()
    return times


def member(job: object, index: int, size: int, pipe: object, trips: int = 24) -> None:
    torch.set_num_threads(1)
    session = job.join(f"w{index}").start(torch.zeros(size))  # type: ignore[attr-defined]
    session.pull()
    push, times = torch.ones(size), list[float]()
    for _ in range(trips):
        start = time.perf_counter()
        session.push_pull(push, copy=False)
        times.append(time.perf_counter() - start)
    pipe.send(times[trips // 6 : -trips // 3])  # type: ignore[attr-defined]
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
        table(f"{args.megabytes} MB push and pull", timed(trips, args.passes), bars)
    with ExitStack() as stack:
        enter = stack.enter_context
        trips = {
            "raw TCP socket": enter(raw(port + 3, 1024)),
            "pyzmq alone, tcp": enter(pyzmq(port + 5, 1024)),
            "ours without sockets": enter(state_machines(1024)),
            "ours, ipc": enter(ours(1024)),
            "ours, tcp": enter(ours(1024, host="127.0.0.1", port=port + 4)),
        }
        table("4 kB push and pull", timed(trips, args.passes, 200))
    with ExitStack() as stack:
        enter = stack.enter_context
        trips = {
            "raw TCP socket": enter(raw(port + 7, 1024, asked=2)),
            "ours, one host": enter(ours(1024, trip="pull")),
            "ours, tcp": enter(ours(1024, host="127.0.0.1", port=port + 6, trip="pull")),
        }
        table("4 kB pull", timed(trips, args.passes, 200), {"ours, one host": 2.0, "ours, tcp": 2.0})
    for title, options in {
        "shards": {f"{n} shards": {"servers": n, "ranges": n} for n in (1, 2, 4)},
        "replicas": {f"{n} replicas": {"servers": n, "replicas": n} for n in (1, 2, 3)},
    }.items():
        with ExitStack() as stack:
            trips = {name: stack.enter_context(ours(size // 4, **one)) for name, one in options.items()}
            table(f"{title}, {args.megabytes // 4} MB, ipc", timed(trips, args.passes))
    sizes = {f"{args.megabytes // d} MB": size // d for d in (16, 8, 4)}
    for title, seconds in {
        "workers at once, 4 MB, ipc": {f"{n} workers": crowd(1 << 20, n) for n in (1, 2, 4)},
        "bytes, 1 worker, ipc": {name: crowd(one, 1) for name, one in sizes.items()},
    }.items():
        table(title, seconds)


if __name__ == "__main__":
    main()
