"""Streams: well mixed, the same whatever ran before, and gone without a trace after the step."""

import random

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.pipeline.stage.random_streams import RandomStreams, behind, mix, own, share_generators

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_mix_is_splitmix64():
    # The first output of splitmix64 seeded with 0 and with 1234567, as published with its reference implementation.
    assert mix(0) == 0xE220A8397B1DCDAF & (1 << 63) - 1
    assert mix(1234567) == 6457827717110365317


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 1000))
def test_every_number_matters(numbers: list[int], index: int, step: int):
    changed = list(numbers)
    changed[index % len(numbers)] += step
    assert 0 <= mix(*numbers) < 2**63
    assert mix(*changed) != mix(*numbers)


def test_no_two_streams_of_a_run_are_the_same():
    streams = RandomStreams(7, CPU)
    seeds = []
    for batch in range(20):
        for microbatch in range(10):
            key = streams.begin(batch, microbatch)
            seeds.append(torch.initial_seed())
            for module in range(50):
                streams.start(key ^ own(module))
                seeds.append(torch.initial_seed())
                streams.start(key ^ behind(module))
                seeds.append(torch.initial_seed())
    assert len(set(seeds)) == len(seeds) == 20 * 10 * 101


def test_a_stream_does_not_depend_on_what_was_drawn_before():
    streams = RandomStreams(3, CPU)
    key = streams.begin(5, 1)
    first = draw()
    streams.start(key ^ own(2))
    inside = torch.rand(4)
    streams.start(key ^ behind(2))
    after = torch.rand(4)
    torch.rand(100)
    assert streams.begin(5, 1) == key and draw() == first
    streams.start(key ^ behind(2))
    assert torch.equal(torch.rand(4), after), "the step goes on the same where the module ran elsewhere"
    torch.rand(7)
    streams.start(key ^ own(2))
    assert torch.equal(torch.rand(4), inside)
    streams.start(key ^ own(3))
    assert not torch.equal(torch.rand(4), inside)
    assert streams.begin(5, 2) != key and streams.begin(6, 1) != key and RandomStreams(4, CPU).begin(5, 1) != key


def test_outside_a_step_the_generators_are_the_users():
    expected = (torch.manual_seed(1), random.seed(1), numpy.random.seed(1), draw(), draw())[-2:]
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    streams = RandomStreams(3, CPU)
    assert draw() == expected[0]
    try:
        with streams.step():
            streams.begin(0, 0)
            draw()
            raise KeyError
    except KeyError:
        pass
    assert draw() == expected[1]


def test_shared_generators_are_those_of_the_rank_that_broadcasts():
    torch.manual_seed(1)
    states = []
    share_generators(lambda value: states.append(value) or value)
    expected = draw()
    draw()
    share_generators(lambda value: states[0])
    assert draw() == expected
