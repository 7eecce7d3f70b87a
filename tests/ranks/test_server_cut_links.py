"""The parameter server on two hosts whose cable is pulled out for longer than a lease, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_parallel.parameter_server import SSP, AddDelta, Layout, Rules
from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.transport.keys import CurveKeys
from lightning_parallel.parameter_server.transport.session import LeaseLostError
from tests.harness import _fork
from tests.namespaces import Host, two_hosts

SIZE, STEPS, HOLD_AT = 8, 12, 4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Hosts:
    """A job whose manager is on the first of two hosts, and its processes on both."""

    def __init__(self, here: Host, there: Host, folder: Path, num_servers: int, replicas: int):
        rules = Rules(Layout(SIZE, 2), AddDelta(), SSP(1), "sum", replicas=replicas, lease=3.0, resend_after=0.5)
        manager = f"tcp://{here.address}:5999"
        self.here, self.there, self.processes = here, there, []
        self.job = Job(rules, num_servers, 2, folder, 77, "token", here.address, manager, keys=CurveKeys.make())
        self.start(here, lambda job, pipe: job.manage())

    def start(self, host: Host, act: Callable[[Job, Connection], None]) -> Connection:
        """Fork a process of a host; what it says comes through the pipe."""
        ours, theirs = _fork.Pipe()
        process = _fork.Process(target=self._run, args=(host, act, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        return ours

    def _run(self, host: Host, act: Callable[[Job, Connection], None], pipe: Connection) -> None:
        host.enter()
        torch.set_num_threads(1)
        act(replace(self.job, host=host.address), pipe)
        pipe.send("end")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    jobs = []
    with two_hosts() as (here, there):

        def make(num_servers: int, replicas: int) -> Hosts:
            jobs.append(Hosts(here, there, tmp_path, num_servers, replicas))
            return jobs[-1]

        yield make
        for job in jobs:
            job.end()


def worker(name: str) -> Callable[[Job, Connection], None]:
    """Pushes a 1 into its own element of both ranges; fenced, it comes back with a new session."""

    def act(job: Job, pipe: Connection) -> None:
        left = count(job, name, STEPS, pipe)
        if left:
            count(job, name, left, pipe)

    return act


def count(job: Job, name: str, steps: int, pipe: Connection) -> int:
    """How many steps are left when the lease is lost."""
    session, done = job.join(name).start(torch.zeros(SIZE)), 0
    try:
        while done < steps:
            session.pull()
            if done == HOLD_AT and steps == STEPS:
                session.settle()
                pipe.send(("at", session.client.worker))
                pipe.recv()
            push = torch.zeros(2, SIZE // 2)
            push[:, session.client.worker - 1] = 1
            session.push(push.flatten())
            done += 1
        session.settle()
        result = session.pull()
        assert not result.torn
        pipe.send(("done", session.client.worker, result.vector.tolist(), result.seqs))
        session.close()
    except LeaseLostError as error:
        pipe.send(("lost", session.client.worker, str(error)))
    return steps - done


def hear(pipe: Connection, timeout: float = 60.0) -> Any:
    assert pipe.poll(timeout), "a process says nothing"
    return pipe.recv()


def assert_counts(vector: list[float], seqs: dict[int, int]) -> None:
    """Both ranges hold exactly the pushes that they say they hold."""
    for half in (vector[: SIZE // 2], vector[SIZE // 2 :]):
        assert {number: half[number - 1] for number in seqs} == seqs


def test_a_worker_whose_cable_is_out_is_fenced_and_comes_back_as_a_joiner(hosts):
    made = hosts(num_servers=1, replicas=1)
    made.start(made.here, lambda job, pipe: job.serve("s0"))
    near, far = made.start(made.here, worker("near")), made.start(made.there, worker("far"))
    numbers = [hear(pipe)[1] for pipe in (near, far)]
    made.there.cable("down")
    near.send("go"), far.send("go")
    kind, number, vector, seqs = hear(near)  # all its steps, once the lease of the other has ended
    assert (kind, number, seqs[number]) == ("done", numbers[0], STEPS)
    assert seqs[numbers[1]] == HOLD_AT
    assert_counts(vector, seqs)
    made.there.cable("up")
    kind, number, text = hear(far)
    assert (kind, number) == ("lost", numbers[1]) and "Start a new session to join again" in text
    kind, number, vector, seqs = hear(far)
    assert kind == "done" and number > max(numbers)
    assert seqs[numbers[1]] == HOLD_AT and seqs[numbers[0]] == STEPS
    assert_counts(vector, seqs)


def test_a_server_whose_cable_is_out_loses_no_acknowledged_update(hosts):
    made = hosts(num_servers=3, replicas=3)
    made.start(made.here, lambda job, pipe: job.serve("s0"))
    made.start(made.here, lambda job, pipe: job.serve("s1"))
    server = made.start(made.there, lambda job, pipe: job.serve("s2"))
    workers = [made.start(made.here, worker(f"w{index}")) for index in range(2)]
    for pipe in workers:
        hear(pipe)  # so many pushes are acknowledged
    made.there.cable("down")
    for pipe in workers:
        pipe.send("go")
    said = [hear(pipe) for pipe in workers]
    for kind, number, vector, seqs in said:
        assert kind == "done" and seqs[number] == STEPS
        assert_counts(vector, seqs)
    assert max(sum(seqs.values()) for _, _, _, seqs in said) == 2 * STEPS
    made.there.cable("up")
    assert hear(server) == "end"  # it is told that it is gone, and goes
