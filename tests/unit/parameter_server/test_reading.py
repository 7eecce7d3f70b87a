"""Where answers are received: in slices of the vector that the pull returns, each used once. How one version comes
about, and what that costs."""

import random

import torch

from lightning_parallel.parameter_server import Asynchronous, Layout
from lightning_parallel.parameter_server.messages import At, Held, Hold, Pull, Rows
from lightning_parallel.parameter_server.worker.reading import CATCH_UPS, Reading
from tests.server_world import World, adding, random_network

LAYOUT = Layout(6, 2)


def received(reading: Reading, key: int, value: float, request: int = 1) -> Rows:
    """An answer whose values came to where the reading wants them, or else anywhere."""
    place = reading.place(Rows(key, request, None, {7: 1}, {7: 1}, 1), LAYOUT)
    values = torch.empty(3) if place is None else place
    return Rows(key, request, values.fill_(value), {7: 1}, {7: 1}, 1)


def test_answers_in_their_slices_are_the_result_without_a_copy():
    reading = Reading(7, 1, (0, 1), 0, 0)
    assert not reading.on_rows(received(reading, 1, 2.0))
    assert reading.on_rows(received(reading, 0, 1.0))
    result = reading.result(LAYOUT)
    assert result.vector is reading.vector and result.vector.tolist() == [1.0] * 3 + [2.0] * 3


def test_an_answer_that_comes_twice_does_not_write_over_the_first():
    reading = Reading(7, 1, (0, 1), 0, 0)
    reading.on_rows(received(reading, 0, 1.0))
    half_arrived = received(reading, 0, 9.0)
    assert reading.on_rows(received(reading, 1, 2.0))
    assert half_arrived.values.tolist() == [9.0] * 3
    assert reading.result(LAYOUT).vector.tolist() == [1.0] * 3 + [2.0] * 3


def test_answers_to_what_was_asked_before_write_elsewhere():
    reading = Reading(7, 1, (0, 1), 0, 0)
    late = reading.place(Rows(0, 1, None, {}, {}, 0), LAYOUT)
    reading.hold(2)
    reading.on_rows(received(reading, 0, 1.0, request=2)), reading.on_rows(received(reading, 1, 2.0, request=2))
    late.fill_(9.0)
    assert reading.place(Rows(0, 1, None, {}, {}, 0), LAYOUT) is None
    assert reading.result(LAYOUT).vector.tolist() == [1.0] * 3 + [2.0] * 3


def test_a_range_that_lacks_what_another_has_is_asked_to_catch_up():
    reading = Reading(7, 1, (0, 1, 2), 0, 0)
    for key, seqs in enumerate([{7: 1, 8: 2}, {7: 1, 8: 1}, {7: 0, 8: 2}]):
        reading.on_rows(Rows(key, 1, torch.zeros(2), seqs, {}, 0))
    assert not reading.agrees(one_version=True)
    least = {7: 1, 8: 2}
    assert reading.again(2) == [(key, Pull(key, 7, 2, 0, 0, least)) for key in (1, 2)]


def test_after_a_few_times_heads_are_held_the_first_before_the_others():
    reading = Reading(7, 1, (0, 1, 2), 0, 0)
    for request in range(2, CATCH_UPS + 2):
        reading.again(request)
    request = CATCH_UPS + 2
    assert reading.again(request) == [(0, Hold(0, 7, request))]
    assert reading.on_held(Held(0, request, {7: 1})) == [(key, Hold(key, 7, request)) for key in (1, 2)]
    assert reading.on_held(Held(2, request, {7: 3})) == []
    assert reading.on_held(Held(1, request, {7: 2})) == [(key, At(key, 7, request, {7: 3})) for key in (0, 1, 2)]


def seconds_in_reads(one_version: bool) -> float:
    """The mean over the reads of four workers that push to eight servers."""
    rng = random.Random(0)
    rules = adding(size=8, ranges=8, consistency=Asynchronous(), one_version=one_version, replicas=1)
    network = random_network(0, mean=0.01)
    world = World(rules, 8, 4, 30, lambda worker, step: rng.uniform(0.05, 0.15), network, joined=True).run()
    reads = [start - end for one in world.workers for start, end in zip(one.starts[1:], one.ends, strict=False)]
    return sum(reads) / len(reads)


def test_one_version_of_eight_servers_costs_less_than_twice_any_version():
    """With heads held one after the other it cost five times as much."""
    assert seconds_in_reads(one_version=True) < 2 * seconds_in_reads(one_version=False)
