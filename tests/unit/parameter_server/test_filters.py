"""Filters by themselves and in a job: what was decoded plus what was left behind is what was pushed."""

import pytest
import torch

from lightning_parallel.parameter_server import BSP, SGD, Layout, Rules
from lightning_parallel.parameter_server.filters import (
    BFloat16,
    Filters,
    Float16,
    Float32,
    Int8,
    RandomSkip,
    SignificantlyModified,
    TopK,
    decode,
)
from lightning_parallel.parameter_server.filters.keys import ReceivedKeys, SentKeys
from lightning_parallel.parameter_server.messages import Coded
from tests.server_world import World, adding, random_network

ALL = {
    "nothing": lambda: Filters(),
    "significant": lambda: Filters([SignificantlyModified(0.5)]),
    "random": lambda: Filters([RandomSkip(0.3)]),
    "top k": lambda: Filters([TopK(0.2)]),
    "fp16": lambda: Filters(precision=Float16()),
    "bf16": lambda: Filters(precision=BFloat16()),
    "int8": lambda: Filters(precision=Int8()),
    "all at once": lambda: Filters([SignificantlyModified(0.1), RandomSkip(0.9), TopK(0.5)], Int8()),
}


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_lost(name):
    filters, generator = ALL[name](), torch.Generator().manual_seed(0)
    pushed, decoded = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for _ in range(40):
        push = torch.randn(50, generator=generator)
        pushed += push
        decoded += decode(filters.encode(3, push))
    # Rounding of one float32 addition a push.
    torch.testing.assert_close(decoded + filters.residual[3], pushed, atol=40 * 1e-6, rtol=0)


@pytest.mark.parametrize(
    ("precision", "bytes_an_element", "rounding"),
    [(Float32(), 4, 0.0), (Float16(), 2, 2**-11), (BFloat16(), 2, 2**-8), (Int8(), 1, 1 / 254)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_number_formats_keep_to_their_rounding(precision, bytes_an_element, rounding):
    values = torch.linspace(-1, 1, 201)
    coded, numbers = precision.encode(values)
    assert coded.element_size() == bytes_an_element
    assert (precision.decode(coded, numbers) - values).abs().max() <= rounding * (1 + 1e-6)


def test_half_numbers_that_are_too_large_go_in_pieces():
    filters = Filters(precision=Float16())
    first = decode(filters.encode(0, torch.tensor([1e5])))
    second = decode(filters.encode(0, torch.tensor([0.0])))
    assert first.item() == 65504 and first + second == pytest.approx(1e5, rel=1e-3)


def test_without_feedback_what_is_not_chosen_is_gone():
    filters = Filters([TopK(0.5)], feedback=False)
    assert decode(filters.encode(0, torch.tensor([1.0, 4.0]))).tolist() == [0.0, 4.0]
    assert decode(filters.encode(0, torch.tensor([0.0, 4.0]))).tolist() == [0.0, 4.0]


def test_residuals_are_a_state():
    filters, resumed = Filters([TopK(0.5)]), Filters([TopK(0.5)])
    filters.encode(0, torch.tensor([1.0, 4.0]))
    resumed.load_state_dict(filters.state_dict())
    assert decode(resumed.encode(0, torch.tensor([0.0, 0.5]))).tolist() == [1.0, 0.0]


def test_places_that_were_sent_before_are_a_digest():
    sender, receiver, other = SentKeys(), ReceivedKeys(), ReceivedKeys()
    coded = Filters([SignificantlyModified(0.5)]).encode(0, torch.tensor([1.0, 0.0, 2.0]))
    first, second = sender.shrink(0, coded), sender.shrink(0, coded)
    assert first is coded and second.codec == "fp32+cached" and second.parts[1].numel() == 1
    receiver.expand(7, first)
    known, values = receiver.expand(7, second)
    assert known and decode(values).tolist() == [1.0, 0.0, 2.0]
    assert other.expand(7, second) == (False, None)
    assert receiver.expand(8, second) == (False, None)


@pytest.mark.parametrize(
    "coded",
    [
        Coded("fp31", 2, (torch.ones(2),)),
        Coded("fp32", 3, (torch.ones(2),)),
        Coded("fp32+sparse", 3, (torch.ones(1), torch.tensor([3]))),
        Coded("fp32+sparse", 3, (torch.ones(1), torch.tensor([-1]))),
        Coded("fp32+sparse", 3, (torch.ones(2), torch.tensor([1]))),
        Coded("fp32+cached", 3, (torch.ones(2), torch.tensor([1]))),
        Coded("fp32", 3, ()),
    ],
    ids=lambda coded: coded.codec,
)
def test_what_does_not_fit_is_refused(coded):
    with pytest.raises(ValueError, match="Cannot decode"):
        decode(coded)


def filtered(rules: Rules, make, **options) -> World:
    world = World(rules, num_servers=3, num_workers=3, steps=12, network=random_network(2), **options)
    for worker in world.workers:
        worker.client.filters = make()
    return world.run()


def test_a_job_with_filters_and_cached_places_loses_nothing():
    world = filtered(adding(size=8, ranges=2), lambda: Filters([SignificantlyModified(2.5)]))
    left = sum(torch.cat([worker.client.filters.residual[key] for key in range(2)]) for worker in world.workers)
    assert (world.weights() + left).tolist() == [36.0] * 8
    assert left.sum() == 0  # every third push goes out whole, 12 of them


def test_a_quadratic_falls_under_every_filter():
    target = torch.linspace(-1, 1, 10)
    for name in ALL:
        rules = Rules(Layout(10, 2), SGD(0.2), BSP(), pull_precision=Float16())
        world = World(rules, 2, 2, 60, network=random_network(0))
        world.work = lambda worker, result: result.vector - target
        for worker in world.workers:
            worker.client.filters = ALL[name]()
        # 1.5: what SignificantlyModified(0.5) keeps back, and the servers' rate.
        assert (world.run().weights() - target).abs().max() < (0.6 if name == "significant" else 0.1), name


def test_words_of_refusals():
    with pytest.raises(ValueError, match=r"TopK got share=0. It is a share of all elements: use a number in \(0, 1\]"):
        TopK(0)
    with pytest.raises(ValueError, match=r"RandomSkip got keep=1.5. It is a probability"):
        RandomSkip(1.5)
