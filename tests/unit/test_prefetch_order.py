"""A way through a stage's blocks: what is whole when, and in which order it is gathered."""

from contextlib import nullcontext

import pytest

from lightning_parallel.zero.collectives import Traffic
from lightning_parallel.zero.gather.prefetch_order import PrefetchOrder


class Told:
    """In a bucket's place: writes down what it is asked to do."""

    def __init__(self, block: int, events: list[str]) -> None:
        self.block, self.events = block, events

    def open(self, traffic: Traffic) -> None:
        self.events.append(f"open {self.block}")

    def arrive(self) -> None:
        self.events.append(f"arrive {self.block}")

    def close(self) -> None:
        self.events.append(f"close {self.block}")


Way = tuple[PrefetchOrder, list[str]]


@pytest.fixture
def way() -> Way:
    """Through blocks 7, 4 and 9, begun."""
    events: list[str] = []
    buckets = {block: [Told(block, events)] for block in (4, 7, 9)}
    passed = lambda block: events.append(f"passed {block}")  # noqa: E731
    walk = PrefetchOrder([7, 4, 9], buckets, Traffic(), lambda what: nullcontext(), passed)  # type: ignore[arg-type]
    return walk, events


def taken(events: list[str]) -> list[str]:
    found = list(events)
    events.clear()
    return found


def test_each_block_is_whole_in_its_turn_and_the_next_one_comes(way: Way):
    walk, events = way
    assert taken(events) == ["open 7"]
    assert walk.enter(7) and taken(events) == ["arrive 7", "open 4"]
    assert walk.enter(4) and taken(events) == ["close 7", "passed 7", "arrive 4", "open 9"]
    assert walk.enter(9) and taken(events) == ["close 4", "passed 4", "arrive 9"]
    walk.finish()
    assert taken(events) == ["close 9", "passed 9"]


def test_what_is_not_called_is_gathered_all_the_same(way: Way):
    walk, events = way
    walk.enter(9)
    gathered = ["open 7", "arrive 7", "open 4", "close 7", "passed 7", "arrive 4", "open 9", "close 4", "passed 4"]
    assert taken(events) == [*gathered, "arrive 9"]
    other, events = PrefetchOrder([7], {7: [Told(7, events)]}, Traffic(), lambda what: nullcontext()), events  # type: ignore[list-item]
    other.finish()
    assert taken(events) == ["open 7", "arrive 7", "close 7"]


def test_a_block_that_was_left_is_free_and_cannot_be_entered_again(way: Way):
    walk, events = way
    walk.enter(7)
    assert walk.enter(7), "it has not been left"
    taken(events)
    walk.leave(4)
    walk.leave(3)
    assert not taken(events), "the way is not there"
    walk.leave(7)
    assert taken(events) == ["close 7"]
    assert not walk.enter(7)
    assert walk.enter(4) and not walk.enter(7), "the way has passed it"
    assert walk.enter(3), "a block of another stage does not concern this way"


def test_what_lies_before_a_block_that_is_computed_again_is_whole_with_it(way: Way):
    walk, events = way
    walk.enter(7)
    taken(events)
    walk.need(9)
    assert taken(events) == ["open 9", "arrive 4", "arrive 9"]
    walk.need(7)
    walk.need(3)
    assert not events


def test_the_first_block_arrives_once(way: Way):
    walk, events = way
    walk.arrive()
    assert taken(events) == ["open 7", "arrive 7"]
    walk.enter(7)
    taken(events)
    walk.arrive()
    assert not events
    PrefetchOrder([], {}, Traffic(), lambda what: nullcontext()).arrive()
