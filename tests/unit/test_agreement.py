"""Who sends what to whom: one message for every stage that uses a value, from the nearest stage that has it."""

from collections.abc import Mapping

import torch

from lightning_parallel.pipeline.stage.agreement import Passed, contracts
from lightning_parallel.pipeline.stage.calls import StopRule
from lightning_parallel.pipeline.transport.tensor_meta import describe

FIRST, SECOND = ("a", 0), ("b", 0)
META = (describe(torch.ones(2)), True)


def passed(unit: str, needed: tuple = (0,), wanted: tuple = (), wanted_for: Mapping | None = None, by: tuple = ()):
    """A stage of one unit, by which everything goes."""
    values = {0: META, 1: META, FIRST: META, SECOND: META}
    return Passed({unit: META[0]}, values, StopRule(), needed, wanted, wanted_for or {}, frozenset(by), False, "")


def sent(stages: list[Passed]) -> dict[tuple[int, int], tuple]:
    return {ends: contract.needed for ends, contract in contracts(dict(enumerate(stages)), {}).items()}


def test_a_value_goes_straight_past_stages_that_do_not_use_it():
    stages = [passed("a", ()), passed("b"), passed("c"), passed("d", wanted=(FIRST,))]
    assert sent(stages) == {(0, 1): (0,), (1, 2): (0,), (2, 3): (0,), (0, 3): (FIRST,)}


def test_it_goes_from_one_user_to_the_next():
    stages = [passed("a", ()), passed("b"), passed("c", wanted=(FIRST,)), passed("d"), passed("e", wanted=(FIRST,))]
    straight = {ends: what for ends, what in sent(stages).items() if FIRST in what}
    assert straight == {(0, 2): (FIRST,), (2, 4): (FIRST,)}


def test_an_argument_of_the_next_stage_is_a_use():
    stages = [passed("a", ()), passed("b", by=(FIRST,)), passed("c"), passed("d", wanted=(FIRST, SECOND))]
    assert sent(stages) == {(0, 1): (0,), (1, 2): (0,), (2, 3): (0,), (1, 3): (FIRST, SECOND)}


def test_what_is_only_needed_to_compute_an_argument_follows_who_computes_it():
    before = [passed("a", ()), passed("b")]
    for needed, receiver in (((0, 1), 2), ((0,), 3)):  # whether the last stage takes the argument, or its parts
        behind = passed("d", needed=needed, wanted=() if receiver == 2 else (FIRST,))
        found = sent([*before, passed("c", wanted_for={1: (FIRST,)}), behind])
        assert [ends for ends, what in found.items() if FIRST in what] == [(0, receiver)]
