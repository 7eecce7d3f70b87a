"""Boards: what tails show to readers of their host, and when it is believed."""

import multiprocessing
import random

import pytest
import torch

from lightning_parallel.parameter_server import SSP, AddDelta, Layout, Rules
from lightning_parallel.parameter_server.launcher import launch
from lightning_parallel.parameter_server.messages import Entry, Pull, View
from lightning_parallel.parameter_server.server.history import Range
from lightning_parallel.parameter_server.transport.board import LARGEST, Board, Boards
from tests.server_world import World, adding

LAYOUT = Layout(2000, 2)
VIEW = View(3, {0: ("s",), 1: ("s",)}, workers={5: "w"})


def part(key: int) -> Range:
    made = Range(key, LAYOUT.length(key), AddDelta())
    made.apply(Entry(1, seed=torch.zeros(LAYOUT.length(key)), joined=(5,), view=3))
    return made


@pytest.fixture
def board(tmp_path):
    shown = Board(tmp_path, "s", LAYOUT)
    shown.stamp(100.0)
    for key in range(2):
        shown.show(key, 3, part(key))
    return shown


@pytest.fixture
def boards(board, tmp_path):
    return Boards(tmp_path, LAYOUT, lease=10.0)


def test_a_look_is_what_the_tails_have(boards):
    vector, rows = boards.look(VIEW, 101.0)
    assert torch.equal(vector, torch.zeros(2000))
    assert [rows[key].seqs for key in range(2)] == [{5: 0}, {5: 0}]


def test_a_board_of_another_view_is_not_believed(boards):
    assert boards.look(View(4, VIEW.chains), 101.0) is None


def test_a_board_whose_server_was_silent_for_a_lease_is_not_believed(boards, board):
    assert boards.look(VIEW, 109.0) is not None and boards.look(VIEW, 110.5) is None
    board.stamp(110.0)
    assert boards.look(VIEW, 110.5) is not None


def test_a_range_that_was_taken_down_is_not_shown(boards, board):
    board.show(1, 0, None)
    assert boards.look(VIEW, 101.0) is None


def test_a_server_of_another_host_has_no_board_here(boards):
    assert boards.look(View(5, {0: ("s",), 1: ("../s",)}), 101.0) is None
    assert boards.look(View(6, {0: ("s",), 1: ("far",)}), 101.0) is None


def test_a_range_that_is_large_is_not_shown(tmp_path):
    layout = Layout(LARGEST // 4 + 1)
    Board(tmp_path, "s", layout).stamp(100.0)
    assert Boards(tmp_path, layout, 10.0).look(VIEW, 101.0) is None


def test_any_bytes_on_a_board_give_an_answer_or_none(boards, board):
    """As with any peer: nothing on a board makes its reader fail."""
    rng = random.Random(0)
    for _ in range(3000):
        at = rng.randrange(len(board._words))
        board._words[at] = rng.choice([0, 2, 3, -1, rng.getrandbits(63), -rng.getrandbits(63)])
        boards.look(VIEW, 101.0)
    board.path.write_bytes(b"short")
    assert boards.look(View(7, VIEW.chains), 101.0) is None


def show_ever_more(board: Board, go_on) -> None:
    shown = part(0)
    for seq in range(1, 1 << 30):
        if not go_on.is_set():
            return
        shown.apply(Entry(shown.lsn + 1, torch.ones(1000), marks={5: (seq, seq)}, pushes=1))
        board.show(0, 3, shown)


def test_what_is_read_while_it_is_written_is_of_one_moment(boards, board):
    fork = multiprocessing.get_context("fork")
    go_on = fork.Event()
    go_on.set()
    writer = fork.Process(target=show_ever_more, args=(board, go_on), daemon=True)
    writer.start()
    last, changes, looks = 0, 0, 0
    while changes < 30 or looks < 3000:
        shown = boards.look(VIEW, 101.0)
        if shown is not None:
            vector, rows = shown
            assert (vector[:1000] == rows[0].seqs[5]).all() and rows[0].minimum == rows[0].seqs[5]
            assert rows[0].seqs[5] >= last
            looks, changes, last = looks + 1, changes + (rows[0].seqs[5] > last), rows[0].seqs[5]
    go_on.clear()
    writer.join()


def test_a_pull_that_tails_show_sends_nothing_and_one_that_must_wait_asks(tmp_path):
    world = World(adding(consistency=SSP(1)), num_workers=2, steps=1, boards=tmp_path, leave=False)
    world.run().settle()
    client = world.workers[0].client
    assert client.pull(world.network.now) == [] and client.looked and torch.equal(client.result.vector, world.weights())
    client.push(torch.ones(4), world.network.now)
    asked = client.pull(world.network.now)  # its own push is in no weights yet
    assert client.result is None and {type(message.body) for message in asked} == {Pull}


def test_servers_of_one_host_show_their_ranges():
    rules = Rules(Layout(10, 2), AddDelta(), SSP(1), scale="sum", replicas=1)
    with launch(rules, 2, 1) as started:
        session = started.job.join("w").start(torch.zeros(10))
        session.pull()
        session.push(torch.ones(10))
        session.settle()
        assert session.pull().vector.tolist() == [1.0] * 10 and session.client.looked == 1
        session.close()
