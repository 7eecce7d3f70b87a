"""The parameter server as real processes: killed, stopped, started again; over ipc, TCP and shared memory."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_parallel.parameter_server import BSP, SGD, SSP, AddDelta, Layout, Rules
from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.launcher import Launch, launch
from lightning_parallel.parameter_server.manager.manager import Manager
from lightning_parallel.parameter_server.server.chain import MANAGER
from lightning_parallel.parameter_server.server.server import Server
from lightning_parallel.parameter_server.transport.session import LeaseLostError
from lightning_parallel.parameter_server.transport.zeromq import Node
from lightning_parallel.parameter_server.worker.client import Client
from tests.harness import _fork, free_port

SIZE = 8
pytestmark = pytest.mark.timeout(120)


def counting(**options) -> Rules:
    options = {"lease": 3.0, "resend_after": 0.5} | options
    return Rules(Layout(SIZE, 2), AddDelta(), scale="sum", **options)


def count(job: Job, name: str, steps: int, pipe, hold_at: int | None = None, stops: bool = False) -> None:
    """Push a 1 into this worker's own element, ``steps`` times; tell how many pushes are acknowledged, and stop."""
    torch.set_num_threads(1)
    session = job.join(name).start(torch.zeros(SIZE))
    try:
        for step in range(steps):
            session.pull()
            if step == hold_at:
                session.settle()
                pipe.send(("at", session.client.worker, step))
                if stops:
                    os.kill(os.getpid(), signal.SIGSTOP)
            push = torch.zeros(SIZE)
            push[session.client.worker - 1] = push[4 + session.client.worker - 1] = 1
            session.push(push)
        session.settle()
        result = session.pull()
        vector = result.vector.tolist()
        whole = {worker: seq for worker, seq in result.seqs.items() if worker not in result.torn}
        pipe.send(("done", session.client.worker, vector, whole))
        session.close()
    except LeaseLostError as error:
        pipe.send(("lost", session.client.worker, str(error)))


class Workers:
    """Forked workers of a job and what they say."""

    def __init__(self, job: Job, steps: int, num: int = 2, hold_at: int | None = None, first: int = 0, stops: int = -1):
        self.pipes, self.processes = [], []
        for index in range(first, first + num):
            ours, theirs = _fork.Pipe()
            args = (job, f"w{index}", steps, theirs, hold_at, index == stops)
            process = _fork.Process(target=count, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def hear(self, index: int, timeout: float = 60.0):
        assert self.pipes[index].poll(timeout), f"worker {index} says nothing"
        return self.pipes[index].recv()

    def end(self) -> None:
        for process in self.processes:
            process.join(20)
            process.kill()


def assert_counts(vector: list[float], seqs: dict[int, int]) -> None:
    """Both ranges hold exactly the pushes that they say they hold."""
    for half in (vector[:4], vector[4:]):
        assert {worker: half[worker - 1] for worker in seqs} == seqs


def transports(name: str) -> dict:
    return {
        "ipc": {},
        "shared memory": {"slab_bytes": 1 << 20},
        "tcp": {"host": "127.0.0.1", "port": free_port()},
    }[name]


@pytest.mark.parametrize("name", ["ipc", "shared memory", "tcp"])
def test_every_transport_counts(name):
    with launch(counting(consistency=SSP(1)), 2, 2, **transports(name)) as started:
        workers = Workers(started.job, steps=10)
        said = [workers.hear(index) for index in range(2)]
        workers.end()
    for kind, worker, vector, seqs in said:
        assert kind == "done" and seqs[worker] == 10
        assert_counts(vector, seqs)


@pytest.mark.parametrize("name", ["ipc", "shared memory", "too little shared memory", "tcp"])
def test_large_vectors_of_several_ranges_arrive_whole(name):
    """Many frames a message; results that are kept do not change."""
    size = 300_000
    slabs = {"shared memory": {"slab_bytes": 8 << 20}, "too little shared memory": {"slab_bytes": 1 << 20}}
    options = slabs.get(name) or transports(name)
    with launch(Rules(Layout(size, 3), AddDelta(), SSP(1), "sum", replicas=2), 2, 1, **options) as started:
        session = started.job.join("w").start(torch.zeros(size))
        vector, results = torch.arange(size, dtype=torch.float32), [session.pull().vector]
        for _ in range(4):
            results.append(session.push_pull(vector).vector)
            vector.add_(1)  # the session has a copy
        session.close()
    wanted, pushed = torch.zeros(size), torch.arange(size, dtype=torch.float32)
    for step, result in enumerate(results):
        assert torch.equal(result, wanted), step
        wanted, pushed = wanted + pushed, pushed + 1


@pytest.mark.parametrize("ranges", [300, pytest.param(1024, marks=pytest.mark.slow)])
def test_more_ranges_than_messages_may_wait_in_a_small_job_lose_none(ranges):
    rules = Rules(Layout(2 * ranges, ranges), AddDelta(), SSP(1), "sum", replicas=1)
    vector = torch.arange(2 * ranges, dtype=torch.float32)
    with launch(rules, 1, 1) as started:
        session = started.job.join("w").start(torch.zeros(2 * ranges))
        session.pull()
        for step in range(1, 4):
            assert torch.equal(session.push_pull(vector).vector, step * vector)
        assert not session.node.counts["dropped"]
        session.close()


def kill(launched: Launch, name: str) -> None:
    process = launched.processes[name]
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def killed_in_the_middle(dead: int, servers: tuple[str, str]) -> tuple[list[Any], list[Any]]:
    """What three workers said when each had 8 pushes acknowledged, and what two of them said at the end: one of them
    and two of four servers were killed in between."""
    with launch(counting(consistency=SSP(2)), 4, 3) as started:
        workers = Workers(started.job, steps=30, num=3, hold_at=8)
        held = [workers.hear(index) for index in range(3)]
        kill(started, servers[0])
        kill(started, servers[1])
        os.kill(workers.processes[dead].pid, signal.SIGKILL)
        said = [workers.hear(index) for index in range(3) if index != dead]
        workers.end()
    return held, said


def assert_nothing_lost(held: list[Any], said: list[Any], dead: int) -> None:
    """The other workers went on, and no acknowledged push is lost."""
    victim = held[dead][1]
    last = max(said, key=lambda one: sum(one[3].values()))
    for kind, worker, _, seqs in said:
        assert kind == "done" and seqs[worker] == 30
    assert_counts(last[2], last[3])
    assert min(last[2][victim - 1], last[2][4 + victim - 1]) >= 8  # it may have died in a push


def test_killing_a_worker_and_two_servers_loses_no_acknowledged_update():
    held, said = killed_in_the_middle(0, ("s1", "s2"))
    assert_nothing_lost(held, said, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dead", range(3))
@pytest.mark.parametrize("servers", list(itertools.combinations(("s0", "s1", "s2", "s3"), 2)), ids="-".join)
def test_killing_any_worker_and_any_two_servers_loses_no_acknowledged_update(dead, servers):
    held, said = killed_in_the_middle(dead, servers)
    assert_nothing_lost(held, said, dead)


def test_a_manager_that_is_killed_and_started_again_goes_on():
    with launch(counting(consistency=SSP(1)), 3, 2) as started:
        workers = Workers(started.job, steps=20, hold_at=5)
        workers.hear(0), workers.hear(1)
        kill(started, "manager")
        kill(started, "s1")
        started.start_manager()  # sees that the server is gone, once its lease has ended
        late = Workers(started.job, steps=3, num=1, first=2)
        said = [workers.hear(0), workers.hear(1), late.hear(0)]
        workers.end(), late.end()
    assert sorted(worker for _, worker, _, _ in said[:2]) == [1, 2] and said[2][1] == 3
    for (kind, worker, vector, seqs), steps in zip(said, (20, 20, 3), strict=True):
        assert kind == "done" and seqs[worker] == steps
        assert_counts(vector, seqs)


def pump(nodes: list[Node], until: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline
        for node in nodes:
            node.pump(0.001)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_links_to_workers_that_left_are_closed():
    """A manager and a server in this process; workers come, and leave or fall silent by turns."""
    rules = counting(lease=0.3)
    manager = Node(Manager(rules, 1, 0), 7, "tcp://127.0.0.1:*", {}, patience=0.05)
    book = {MANAGER: manager.endpoint}
    server = Node(Server("s", rules), 7, "tcp://127.0.0.1:*", book)
    server.machine.endpoint = server.endpoint
    server.send(server.machine.start(server.now()))
    staying = [manager, server]
    pump(staying, lambda: server.machine.view.number > 0)
    before = num_open_files()
    for index in range(4):
        worker = Node(Client(f"w{index}", f"w{index}", rules), 7, "tcp://127.0.0.1:*", book)
        client = worker.machine
        client.endpoint = worker.endpoint
        worker.send(client.start(worker.now()))
        worker.send(client.seed(torch.zeros(SIZE)))
        pump([*staying, worker], lambda client=client: client.address in client.view.endpoints)
        assert client.address in manager.links
        if index % 2:
            worker.send(client.leave())
            pump([*staying, worker], lambda client=client: client.address not in manager.machine.view.endpoints)
        worker.close()
        pump(staying, lambda: manager.links.keys() == {"s"} and num_open_files() <= before)
    for node in staying:
        node.close()


def test_a_worker_that_is_stopped_past_its_lease_is_fenced():
    with launch(counting(consistency=SSP(0)), 1, 2) as started:
        workers = Workers(started.job, steps=6, hold_at=2, stops=0)
        workers.hear(0), workers.hear(1)
        kind, worker, vector, seqs = workers.hear(1)  # goes on once the lease of the other has ended
        os.kill(workers.processes[0].pid, signal.SIGCONT)
        said = workers.hear(0)
        workers.end()
    assert kind == "done" and seqs[worker] == 6
    assert_counts(vector, seqs)
    assert said[0] == "lost" and "Start a new session to join again" in said[2]


def descend(job: Job, name: str, steps: int, pipe, colocated: bool) -> None:
    torch.set_num_threads(1)
    if colocated:
        job.serve_in_thread(f"s-{name}")
    session = job.join(name).start(torch.ones(SIZE))
    for _ in range(steps):
        session.push(session.pull().vector - 3.0)
    pipe.send(session.pull().vector.tolist())
    session.close()


def run_descent(job: Job, steps: int, num: int, colocated: bool = False) -> list[list[float]]:
    pairs = [_fork.Pipe() for _ in range(num)]
    args = [(job, f"w{index}", steps, theirs, colocated) for index, (_, theirs) in enumerate(pairs)]
    processes = [_fork.Process(target=descend, args=one, daemon=True) for one in args]
    for process in processes:
        process.start()
    found = []
    for ours, _ in pairs:
        assert ours.poll(60)
        found.append(ours.recv())
    for process in processes:
        process.join(10)
        process.kill()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bsp_over_processes_equals_one_process(world):
    """Worlds of any size; every worker pushes the same gradient, so the mean is that gradient."""
    weights = torch.nn.Parameter(torch.ones(SIZE))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    for _ in range(4):
        weights.grad = weights.detach() - 3.0
        optimizer.step()
    with launch(Rules(Layout(SIZE, 2), SGD(0.1, 0.9), BSP()), 1, world) as started:
        found = run_descent(started.job, 4, world)
    assert found == [weights.tolist()] * world


def test_shards_in_threads_of_the_workers():
    with launch(Rules(Layout(SIZE, 2), SGD(0.1), BSP()), 2, 2, colocated=True) as started:
        found = run_descent(started.job, 3, 2, colocated=True)
    assert found[0] == found[1] and found[0][0] == pytest.approx(3 - 2 * 0.9**3)


def test_a_restart_of_everything_resumes(tmp_path):
    rules = Rules(Layout(SIZE, 2), SGD(0.1, 0.9), BSP())
    found = []
    for _ in range(2):
        with launch(rules, 2, 1, log=tmp_path) as started:
            found += run_descent(started.job, 3, 1)
    with launch(rules, 2, 1) as started:
        (straight,) = run_descent(started.job, 6, 1)
    assert found[1] == straight != found[0]


def test_an_address_that_others_reach_needs_keys():
    with pytest.raises(ValueError, match=r"0\.0\.0\.0:5555 is reached from other hosts\. Give keys=Keys\.make\(\)"):
        Node(Manager(counting(), 1, 1), 1, "tcp://0.0.0.0:5555", {})


def test_curve_keys_work_and_are_needed():
    with launch(counting(consistency=SSP(1)), 1, 1, host="0.0.0.0", port=free_port()) as started:
        assert started.job.keys is not None
        workers = Workers(started.job, steps=3, num=1)
        assert workers.hear(0)[0] == "done"
        workers.end()


def test_who_cannot_join_leaves_no_sockets_open():
    """Warnings of sockets that nobody closed are errors."""
    with launch(counting(), 1, 2) as started:
        session = started.job.join("w0", timeout=0.3)  # the job waits for a second worker
        with pytest.raises(TimeoutError, match=r"w0\..* got no answer in 0\.3 s"):
            session.start()
        assert session.node.context.closed
