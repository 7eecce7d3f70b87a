"""A manager's log: the last whole record is what was known, and a manager made of it knows the same."""

import pytest

from lightning_parallel.parameter_server import SSP, Manager
from lightning_parallel.parameter_server.manager import roster as log
from lightning_parallel.parameter_server.manager.roster import Member, Roster, RosterLog
from lightning_parallel.parameter_server.messages import View
from tests.server_world import World, adding

FIRST = Roster(View(3, {0: ("a", "b")}, {0: "c"}, {1: "w"}, {"a": "ipc://a"}), {"a": Member("server", "a", "ipc://a")})
SECOND = Roster(View(4), {"w": Member("worker", "w", "", 7, {0: 12})}, ("a", "b"), 7)


def test_what_was_written_last_is_read(tmp_path):
    journal = RosterLog(tmp_path / "manager.log")
    assert journal.read() is None
    for roster in (FIRST, SECOND):
        journal.append(roster)
        assert RosterLog(journal.path).read() == roster


@pytest.mark.parametrize("cut", [1, 8, 60])
def test_a_record_that_was_cut_off_is_left_out_and_the_log_goes_on(tmp_path, cut):
    journal = RosterLog(tmp_path / "manager.log")
    journal.append(FIRST), journal.append(SECOND)
    journal.path.write_bytes(journal.path.read_bytes()[:-cut])
    assert journal.read() == FIRST
    journal.append(SECOND)
    assert journal.read() == SECOND


def test_a_byte_that_rotted_ends_the_log(tmp_path):
    journal = RosterLog(tmp_path / "manager.log")
    journal.append(FIRST), journal.append(SECOND)
    raw = bytearray(journal.path.read_bytes())
    raw[-10] ^= 1
    journal.path.write_bytes(bytes(raw))
    assert journal.read() == FIRST


def test_a_log_begins_anew_before_it_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "ANEW_AFTER", 1000)
    journal = RosterLog(tmp_path / "manager.log")
    for _ in range(50):
        journal.append(SECOND)
    assert journal.path.stat().st_size < 1200 and journal.read() == SECOND


def test_a_manager_made_of_the_log_knows_what_the_last_one_knew():
    """At every record of a run with a server and a worker that come late, and a server that dies."""
    kept = []

    class Written(World):
        def write_roster(self, roster):
            super().write_roster(roster)
            kept.append((roster, self.manager.view))

    world = Written(adding(consistency=SSP(1)), 3, 2, steps=8)
    world.network.at(2.0, world.add_server)
    world.network.at(3.0, lambda: world.network.crash("s1"))
    world.network.at(4.0, lambda: world.add_worker("late"))
    world.run().settle()
    assert len(kept) > 8
    for roster, view in kept:
        again = Manager(world.rules, 3, 2, roster=roster)
        told = again.start(0.0)
        assert again.view == view == roster.view and again.members == roster.members
        assert {message.target for message in told if message.body == view} == (
            set(roster.members) if view.number else set()
        )
