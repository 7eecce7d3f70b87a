"""Logs: what was written is what is read, up to the last whole entry."""

from contextlib import closing

import pytest
import torch

from lightning_parallel.parameter_server import SSP, Adam, Layout, Rules, Server
from lightning_parallel.parameter_server.manager.roster import Roster, RosterLog
from lightning_parallel.parameter_server.server.storage import Storage
from tests.security.test_full_disk import no_room
from tests.server_world import World


def logged(tmp_path, snapshot_every: int):
    """A job of one server whose ranges are logged, at its end."""
    rules = Rules(Layout(6, 2), Adam(0.1), SSP(1))
    storage = Storage(tmp_path, rules, snapshot_every)

    class Logged(Server):
        def __init__(self, address, rules):
            super().__init__(address, rules, journal=storage.append)
            storage.watch(self)

    world = World(rules, 1, 2, 7, server_class=Logged, initial=torch.ones(6))
    world.work = lambda worker, result: result.vector - 2.0
    with closing(storage):
        world.run()
    return world, rules


def assert_same(part, read):
    assert torch.equal(part.weights, read.weights)
    assert all(torch.equal(part.state[slot], read.state[slot]) for slot in part.state)
    assert (part.lsn, part.version, part.seqs, part.steps) == (read.lsn, read.version, read.seqs, read.steps)
    assert part.clocks.copy() == read.clocks.copy() and part.clocks.minimum == read.clocks.minimum


def test_a_log_is_the_range(tmp_path):
    for every in (1000, 4):
        world, rules = logged(tmp_path / str(every), every)
        found = Storage(tmp_path / str(every), rules).read()
        for key in range(2):
            assert_same(world.part(key), found[key])


def test_an_entry_that_was_cut_off_is_left_out(tmp_path):
    world, rules = logged(tmp_path, 1000)
    path = tmp_path / "range-0.log"
    whole = path.read_bytes()
    for cut in (1, 20, 60):
        path.write_bytes(whole[:-cut])
        found = Storage(tmp_path, rules).read()
        assert 0 < found[0].lsn < world.part(0).lsn
        assert_same(world.part(1), found[1])


def test_an_entry_for_which_there_is_no_room_is_not_taken_for_written(tmp_path):
    """The system takes a part of the last entry, and says so without an error."""
    logged(tmp_path / "whole", 1000)
    most = max(path.stat().st_size for path in (tmp_path / "whole").glob("range-*.log"))
    folder = tmp_path / "full"
    words = (
        rf"The log {folder}/range-.\.log could not be written: File too large\. {folder} has .* MiB free, and"
        r" the record has 0\.000 MiB\. All before it is whole\. Make room, or give launch\(log=\) a folder of another"
        " disk; then start the job again"
    )
    with no_room(most - 10), pytest.raises(OSError, match=words):
        logged(folder, 1000)


def test_a_managers_log_for_which_there_is_no_room_names_it(tmp_path):
    log = RosterLog(tmp_path / "manager.log")
    log.append(Roster(workers=1))
    with no_room(10), pytest.raises(OSError, match=r"manager\.log could not be written: .* or set TMPDIR to a folder"):
        log.append(Roster(workers=2))
    assert log.read() == Roster(workers=1)


def test_a_byte_that_rotted_ends_the_log(tmp_path):
    world, rules = logged(tmp_path, 1000)
    path = tmp_path / "range-0.log"
    raw = bytearray(path.read_bytes())
    raw[-30] ^= 1
    path.write_bytes(bytes(raw))
    assert Storage(tmp_path, rules).read()[0].lsn == world.part(0).lsn - 1


def test_a_file_that_is_no_log_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "range-0.log"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a log of this version of the parameter server"):
        Storage(tmp_path, Rules(Layout(6, 2), Adam(0.1), SSP(1))).read()
    assert path.read_bytes() == b"something else"
