"""Where answers are received: in slices of the vector that the pull returns, each used once."""

import torch

from lightning_parallel.server import Layout
from lightning_parallel.server.messages import Rows
from lightning_parallel.server.reading import Reading

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
