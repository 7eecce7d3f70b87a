"""Portions of a batch on the virtual clock: idle workers, duplicates, crashes of everybody; each result counts once."""

import random

import pytest
import torch

from lightning_parallel.parameter_server import AddDelta, Asynchronous, Layout, Manager, Rules, Server
from lightning_parallel.parameter_server.manager.portions import Portions
from lightning_parallel.parameter_server.manager.roster import Roster
from lightning_parallel.parameter_server.manager.sharing import Sharing
from lightning_parallel.parameter_server.messages import (
    Batch,
    Counted,
    Done,
    Finished,
    Hello,
    Idle,
    Message,
    Portion,
    Wake,
)
from lightning_parallel.parameter_server.sandblaster.caller import Caller, ServerShards
from lightning_parallel.parameter_server.sandblaster.helper import Helper
from tests.server_world import random_network

SIZE, COUNT = 6, 10


class Computer:
    """A helper that computes for a while: portion p adds p + 1 to every element."""

    def __init__(self, helper: Helper, seconds):
        self.helper, self.seconds, self.address, self.finish_at = helper, seconds, helper.address, None
        self.done = []

    @property
    def view(self):
        return self.helper.view

    @property
    def wake_at(self):
        due = [time for time in (self.helper.wake_at, self.finish_at) if time is not None]
        return min(due, default=None)

    def handle(self, message, now):
        out = self.helper.handle(message, now)
        if self.finish_at is not None and now >= self.finish_at:
            self.finish_at = None
            self.done.append(self.helper.portion)
            assert torch.equal(self.helper.vector, torch.ones(SIZE, dtype=torch.float64))
            out += self.helper.give(torch.full((SIZE,), 1.0 + self.helper.portion.portion), self.helper.portion.portion)
        elif self.helper.has_work and self.finish_at is None:
            self.finish_at = now + self.seconds()
        return out


class Job:
    """A coordinator, helpers and servers."""

    def __init__(self, seed: int, helpers: int = 4, servers: int = 3):
        self.rng = random.Random(seed)
        self.network = random_network(seed, mean=0.02, lose=0.02, double=0.02)
        self.rules = Rules(Layout(SIZE, 2), AddDelta(), Asynchronous(), lease=10.0, resend_after=0.5)
        self.roster = Roster()
        self.start_manager()
        for index in range(servers):
            server = Server(f"s{index}", self.rules)
            self.network.add(server, server.start(0.0))
        self.caller = Caller("coordinator", self.rules)
        self.network.add(self.caller, self.caller.start(0.0))
        self.helpers = [self.add_helper(f"h{index}") for index in range(helpers)]
        self.network.run(until=lambda: self.caller.view.number > 0)
        self.shards = ServerShards(self.caller, self.do)
        self.network.send(self.caller.seed(torch.ones(SIZE)))

    def do(self, start, until) -> None:
        self.network.send(start(self.network.now))
        self.network.run(until=until)

    def start_manager(self) -> None:
        self.manager = Manager(self.rules, 3, 0, roster=self.roster, journal=self.keep)
        self.network.add(self.manager, self.manager.start(self.network.now))

    def keep(self, roster: Roster) -> None:
        self.roster = roster

    def add_helper(self, address: str) -> Computer:
        computer = Computer(Helper(address, self.rules), lambda: self.rng.expovariate(1.0))
        self.network.add(computer, computer.helper.start(self.network.now))
        return computer

    def run(self) -> None:
        """Every portion once: the values' sum, and the results' in every element."""
        assert self.shards.share(COUNT) == sum(range(COUNT))
        assert self.shards.call("dot", "g", "g") == SIZE * sum(range(1, COUNT + 1)) ** 2


@pytest.mark.parametrize("seed", range(4))
def test_every_portion_counts_once_over_a_network_that_loses_and_doubles(seed):
    job = Job(seed)
    for _ in range(3):
        job.run()
    assert len({computer.address for computer in job.helpers if computer.done}) == 4
    assert sum(computer.helper.first for computer in job.helpers) <= 3 * COUNT  # the last answers may be under way
    assert job.manager.sharing.duplicated > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_portion_of_a_helper_that_dies_goes_to_another(seed):
    job = Job(seed)
    job.network.at(job.network.now + 1.0, lambda: job.network.crash("h0"))
    job.network.at(job.network.now + 1.5, lambda: job.network.crash("h1"))
    job.network.at(job.network.now + 2.0, lambda: job.add_helper("h9"))
    job.run()
    job.run()


@pytest.mark.parametrize("seed", range(4))
def test_a_manager_that_is_started_again_keeps_what_is_done(seed):
    """Its log has every portion that was counted: none of them is handed out again, and none is lost."""
    job, kept = Job(seed), []

    def restart() -> None:
        kept.extend(job.roster.progress.results)
        for computer in job.helpers:
            computer.done.clear()
        job.start_manager()

    def run(start, until) -> None:
        job.network.send(start(job.network.now))
        job.network.run(until=lambda: until() or len(job.roster.progress.results) == 3)
        if not until():
            job.network.crash("manager")
            job.network.at(job.network.now + 2.0, restart)
            job.network.run(until=until)

    job.shards.do = run
    assert job.shards.share(COUNT) == sum(range(COUNT))
    job.shards.do = job.do
    under_way = {computer.done[0].portion for computer in job.helpers if computer.done}
    again = {portion.portion for computer in job.helpers for portion in computer.done} - under_way
    assert len(kept) == 3 and not again & set(kept)
    assert job.shards.call("dot", "g", "g") == SIZE * sum(range(1, COUNT + 1)) ** 2


def test_a_result_from_before_the_manager_was_started_again_counts_once():
    sent = []
    first = Sharing(lambda target, body: None)
    changes = [first.handle("c", Batch(1, 2)), first.handle("a", Idle()), first.handle("b", Idle())]
    changes += [first.handle("a", Finished(1, 0, 2.5)), first.handle("a", Finished(1, 0, 2.5))]
    assert changes == [True, False, False, True, False]  # what must be in the log before anybody is told
    second = Sharing(lambda target, body: sent.append((target, body)), first.progress)
    second.handle("a", Finished(1, 0, 2.5))  # its answer was lost
    second.handle("d", Finished(1, 0, 9.0))
    second.handle("b", Finished(1, 1, 4.0))  # of a portion that the first one gave out
    second.handle("b", Finished(1, 7, 4.0))  # of none
    counted = [Counted(1, 0, 1), Counted(1, 0, 0), Counted(1, 1, 1), Counted(1, 7, 0)]
    assert [body for target, body in sent if target != "c"] == counted
    assert [body for target, body in sent if target == "c"] == [Done(1, 6.5)]


def test_the_next_coordinator_goes_on_counting_batches():
    job = Job(6)
    job.run()
    job.network.send(job.caller.leave())
    job.caller = Caller("coordinator 2", job.rules)
    job.network.add(job.caller, job.caller.start(job.network.now))
    job.shards = ServerShards(job.caller, job.do)
    job.run()
    assert job.caller.batch.batch == 2


def test_a_call_that_cannot_be_done_is_refused_and_the_servers_go_on():
    job = Job(7)
    with pytest.raises(ValueError, match=r"No vector 'z' in \('dot', 'x', 'z'\); vectors are x\."):
        job.shards.call("dot", "x", "z")
    with pytest.raises(ValueError, match=r"No call \('solve', 'x'\); calls are dot, scale"):
        job.shards.call("solve", "x")
    job.run()


@pytest.mark.parametrize("seed", range(4))
def test_a_server_and_the_manager_die_in_a_batch(seed):
    job = Job(seed)
    job.network.at(job.network.now + 1.0, lambda: job.network.crash("s0"))
    job.network.at(job.network.now + 2.0, lambda: job.network.crash("manager"))
    job.network.at(job.network.now + 4.0, job.start_manager)
    job.run()
    job.run()


def test_a_lone_helper_that_is_lost_leaves_its_portion_to_the_next():
    sent = []
    sharing = Sharing(lambda target, body: sent.append((target, body)))
    sharing.handle("c", Batch(1, 1))
    sharing.handle("a", Idle())
    sharing.handle("b", Idle())  # the only portion again: it is outstanding
    sharing.leave("a")
    sharing.leave("b")
    sharing.handle("d", Idle())
    sharing.handle("d", Idle())  # asked again, the same
    portion = Portion(1, 0)
    assert sent == [("a", portion), ("b", portion), ("d", portion), ("d", portion)]
    del sent[:]
    sharing.handle("d", Finished(1, 0, 2.5))
    sharing.handle("b", Finished(1, 0, 7.0))
    sharing.handle("d", Finished(1, 0, 2.5))
    sharing.handle("c", Batch(1, 1))
    first, second, done = Counted(1, 0, 1), Counted(1, 0, 0), Done(1, 2.5)
    assert sent == [("c", done), ("d", first), ("b", second), ("d", first), ("c", done)]


def test_a_result_of_a_batch_that_is_over_does_not_count():
    job = Job(5, helpers=1)
    late = Helper("late", job.rules)
    late.portion, late.vector = Portion(1, COUNT), torch.ones(SIZE)
    job.run()
    job.run()
    late.view = job.caller.view
    job.network.add(late, late.give(torch.ones(SIZE), 1.0))
    job.network.run(until=lambda: late.is_answered)
    assert job.shards.call("dot", "g", "g") == SIZE * sum(range(1, COUNT + 1)) ** 2


def test_a_batch_has_a_portion():
    with pytest.raises(ValueError, match=r"Portions got count=0\. A batch has 1 or more\."):
        Portions(0)


def test_with_patience_a_portion_goes_to_a_second_worker_once_it_is_late():
    """Twice as long as the slowest of those that are done took; the manager wakes then, and hands it out."""
    rules = Rules(Layout(SIZE, 2), AddDelta(), Asynchronous(), backup_after=2.0)
    manager = Manager(rules, 1, 0)

    def say(source, body, now):
        sent = manager.handle(Message(source, "manager", manager.view.number, body), now)
        return [(one.target, one.body) for one in sent if isinstance(one.body, (Portion, Done))]

    for role, name in (("server", "s"), ("coordinator", "c"), ("helper", "a"), ("helper", "b")):
        say(name, Hello(role, name), 0.0)
    say("c", Batch(1, 2), 0.0)
    assert say("a", Idle(prefers=1), 0.0) == [("a", Portion(1, 1))]
    assert say("b", Idle(), 0.0) == [("b", Portion(1, 0))]
    say("a", Finished(1, 1, 10.0), 1.0)
    assert say("a", Idle(prefers=1), 1.0) == [] and manager.wake_at == 2.0
    assert say("", Wake(), 2.0) == [("a", Portion(1, 0))]
    assert say("a", Finished(1, 0, 1.0), 2.5) == [("c", Done(1, 11.0))]
    assert say("b", Finished(1, 0, 1.0), 9.0) == []  # too late
