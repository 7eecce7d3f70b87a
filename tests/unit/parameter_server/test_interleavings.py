"""Random interleavings with faults: what must hold in every one, and that it does not without each safeguard."""

import faulthandler
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from lightning_parallel.parameter_server import AddDelta, Server
from lightning_parallel.parameter_server.messages import Ack, Append, Committed, Entry, Message, Push, View
from lightning_parallel.parameter_server.server.head import Intake
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.server.replica import Replica
from tests.server_faults import Faults, Plan, plans, play
from tests.server_watch import Watch, WatchedReplica, watched
from tests.server_world import adding

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=300, derandomize=True, phases=[Phase.generate], **QUIET)
@given(plans)
@pytest.mark.timeout(300)
def test_what_must_hold_holds_in_random_interleavings(plan):
    play(plan)


@pytest.mark.slow
@pytest.mark.hours
@settings(max_examples=100_000, phases=[Phase.generate], **QUIET)
@given(plans)
@pytest.mark.timeout(6 * 3600)
def test_what_must_hold_holds_in_a_hundred_thousand_interleavings(plan):
    faulthandler.cancel_dump_traceback_later()  # pytest's, of a running thread: it can end the interpreter
    play(plan)


class AckBeforeTheTail(WatchedReplica):
    """A worker is told as soon as the head has its push."""

    def taken(self, entry):
        super().taken(entry)
        for worker, (seq, _) in entry.marks.items() if self.is_head else ():
            self.acked[worker] = seq
            self._tell(worker, Ack(self.part.key, seq))


class TakesTwice(Intake):
    """A push that is sent again is taken in again."""

    def is_duplicate(self, push):
        if push.seq <= self.taken[push.worker]:
            self.taken[push.worker] = push.seq - 1
        return False


class Duplicates(WatchedReplica):
    """No deduplication by sequence number."""

    def flush(self, now):
        self.intake.__class__ = TakesTwice
        super().flush(now)

    def on_push(self, source, push, now):
        self.intake.__class__ = TakesTwice
        super().on_push(source, push, now)


class NoFence(Server):
    """Messages of any view are acted on."""

    def is_current(self, message):
        return True

    def _act(self, message, now):
        object.__setattr__(message, "view", min(message.view, self.view.number))
        super()._act(message, now)


class NoRepair(WatchedReplica):
    """What a dead server had not passed on is not sent again."""

    def repair(self, now):
        self.sent.clear()

    def forward_again(self, now):
        self._set_timer(now)

    def on_want(self, source, want):
        pass

    def _send_copy(self):
        pass


SAFEGUARDS = {
    "all": {},
    "ack after the tail": {"replica_class": AckBeforeTheTail},
    "deduplication": {"replica_class": Duplicates},
    "fencing": {"server_class": NoFence},
    "repair": {"replica_class": NoRepair},
}


def wrong(name: str, schedules: int) -> str | None:
    """What first went wrong in schedules with two server faults and replays."""
    for seed in range(schedules):
        plan = Plan(seed, rule=2, workers=3, servers=4, ranges=1, steps=6, server_faults=2, worker_joins=1, lossy=True)
        try:
            play(plan, limit=6_000, **SAFEGUARDS[name])
        except (AssertionError, TimeoutError, KeyError) as error:
            return str(error) or type(error).__name__
    return None


@pytest.mark.parametrize("name", SAFEGUARDS)
@pytest.mark.timeout(120)
def test_each_safeguard_is_needed(name):
    found = wrong(name, 20 if name == "all" else 120)
    assert (found is None) == (name == "all"), found


def test_a_zombie_worker_counts_for_nothing():
    """Stopped longer than its lease: the others go on, and what it sends when it wakes is refused."""
    world = Faults(Plan(3, rule=2, workers=3, server_faults=0, steps=8))
    victim = world.workers[0]
    world.network.at(5.0, lambda: world.network.stop(victim.address))
    world.network.at(60.0, lambda: world.network.go_on(victim.address))
    world.network.run(until=lambda: world.network.now > 70)
    assert victim.client.lost and victim.done < 8
    assert [worker.done for worker in world.workers[1:]] == [8, 8]
    seqs = world.settle().part(0).seqs[victim.client.worker]
    assert seqs <= victim.done
    world.check_end()


def test_a_cut_link_between_two_servers_loses_nothing():
    world = Faults(Plan(5, rule=2, workers=3, server_faults=0, steps=8, ranges=1))
    head, second, _ = (f"s{i}" for i in range(3))
    links = {(head, second), (second, head), (head, "s2"), ("s2", head)}
    world.network.at(4.0, lambda: world.network.cut.update(links))
    world.network.at(9.0, world.network.cut.clear)
    world.run().settle()
    world.check_end()
    assert world.part(0).version == 24


def test_a_push_that_the_head_did_not_pass_on_itself_is_acknowledged_when_it_is_sent_again():
    """Its replica came as a copy. The worker that only waits for the acknowledgement waited for ever."""
    plan = Plan(
        301, rule=5, workers=3, servers=4, ranges=1, server_faults=2, worker_joins=1, worker_faults=1, lossy=True
    )
    play(replace(plan, boards=True))
    part, sent = Range(0, 1, AddDelta()), []
    part.apply(Entry(1, seed=torch.zeros(1), joined=(5,)))
    push = Push(0, 5, 1, 1, torch.ones(1))
    part.apply(Entry(2, push.values, marks={5: (1, 1)}, pushes=1))
    head = Replica("a", part, adding(1, 1), lambda target, body: sent.append((target, body)))
    head.adopt(View(2, {0: ("a", "b")}, workers={5: "w"}), 0.0)
    head.on_push("w", push, 0.0)
    assert ("w", Ack(0, 1)) not in sent  # who knows what the tail has
    head.on_committed(Committed(0, 3), 0.0)
    head.on_push("w", push, 0.0)
    assert sent[-1] == ("w", Ack(0, 1))


def test_what_a_head_made_and_passed_on_as_a_copy_alone_is_history_when_the_head_is_gone():
    """The head left before a tail had its last entry. Every server after it got that entry inside of a copy, and the
    watch, which looked for it in the chain as it was by then, did not know the version that was read."""
    joins = {"server_joins": 2, "worker_joins": 2}
    play(Plan(335684432, rule=3, workers=4, ranges=3, steps=2, aggregate=4, ordered=False, joined=True, **joins))


def test_the_watch_sees_a_history_that_forked_also_in_a_copy():
    watch, fork = Watch(), [Entry(1, joined=(w,), marks={w: (1, 1)}) for w in (5, 6)]
    for server, entry in zip("ab", fork, strict=True):
        watch.held[server, 0] = []
        watch.take(server, 0, entry)
    watch.commit("a", 0, 1)
    assert watch.versions(0) == [{}, {5: 1}]
    part = Range(0, 1, AddDelta())
    part.apply(fork[1])
    copy = part.copy()
    watch.sent("b", copy)
    joiner = watched(watch)("c", adding(1, 1))
    joiner.handle(Message("manager", "c", 1, View(1, {0: ("b",)}, joining={0: "c"})), 0.0)
    joiner.handle(Message("b", "c", 1, copy), 0.0)
    joiner.handle(Message("manager", "c", 2, View(2, {0: ("b", "c")})), 0.0)
    with pytest.raises(AssertionError, match="range 0 has two histories"):
        joiner.handle(Message("b", "c", 2, Append(0, Entry(2, view=2))), 0.0)


def test_a_restarted_worker_of_the_same_name_takes_over():
    world = Faults(Plan(7, rule=0, workers=2, server_faults=0, steps=6))
    world.network.at(3.0, lambda: world.add_worker("w0"))
    world.run().settle()
    first, second = world.workers[0], world.workers[2]
    assert first.client.lost and second.finished and second.client.worker == 3
    world.check_end()


def test_training_goes_on_without_the_manager():
    world = Faults(Plan(9, rule=2, workers=3, server_faults=0, steps=6))
    world.leave = False
    world.network.run(until=lambda: world.network.now > 3)
    world.network.crash("manager")
    world.run()
    assert [worker.done for worker in world.workers] == [6, 6, 6]
    world.check_end()


def test_a_manager_that_is_started_again_goes_on_with_its_log():
    world = Faults(Plan(9, rule=2, workers=3, servers=3, server_faults=0, steps=12))
    before = []
    world.network.at(3.0, lambda: before.append(world.manager.view) or world.network.crash("manager"))
    world.network.at(4.0, lambda: world.network.crash("s0"))  # seen by nobody
    world.network.at(4.5, lambda: world.add_worker("new"))  # must wait
    world.network.at(8.0, world.start_manager)
    world.run().settle()
    world.check_end()
    assert world.manager.view.number > before[0].number and "s0" in world.manager.gone
    assert [worker.done for worker in world.workers] == [12] * 4 and world.workers[3].client.worker == 4


def test_a_manager_without_its_log_knows_nobody():
    world = Faults(Plan(9, rule=2, workers=3, servers=3, server_faults=0, steps=50))
    world.network.run(until=lambda: world.network.now > 3)
    world.network.crash("manager")
    world.roster = None
    world.start_manager()
    world.network.run(until=lambda: world.network.now > 20)
    assert all(worker.client.lost for worker in world.workers)


def test_servers_that_join_take_ranges_over_and_ranges_of_those_that_leave_find_new_ones():
    world = Faults(Plan(2, rule=2, workers=2, servers=3, ranges=3, server_faults=0, steps=20))
    world.network.at(4.0, world.add_server)
    world.network.at(5.0, world.add_server)
    world.network.at(12.0, lambda: world.network.crash("s0"))
    world.run().settle()
    world.check_end()
    chains = world.manager.view.chains.values()
    assert {len(chain) for chain in chains} == {3}
    assert {"s3", "s4"} & {server for chain in chains for server in chain}
    assert not any("s0" in chain for chain in chains)
