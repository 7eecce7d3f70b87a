"""Ranks that call different parts of a model are told which, before their gathers meet."""

from collections.abc import Callable

import pytest

from lightning_parallel.zero.same_calls import SameCalls
from tests.harness import run_ranks

Calls = list[tuple[int, str]]
ADVICE = (
    'engine="fsdp2" gathers parameters where a part of the model is called, and the ranks call different ones in a'
    ' step.{} Decide branches by what all ranks see alike, or use ZeROStrategy(stage=2, engine="native"), whose ranks'
    " may differ."
)


def told(rank: int, ways: list[Calls], every: bool) -> str:
    calls = SameCalls(["net", "head"], None, "fsdp2", every)
    try:
        for number, way in ways[rank]:
            calls.call(number, way)
        calls.end()
    except ValueError as error:
        return str(error)
    return ""


BOTH: Calls = [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")]


@pytest.mark.parametrize(
    ("ways", "where"),
    [
        ([BOTH, BOTH], None),
        ([BOTH, BOTH[:2] + BOTH[3:]], "the backward of `head` when another is at the backward of `net`"),
        ([BOTH, [(1, "forward")]], "the forward of `head` when another is at the forward of `net`"),
        ([BOTH[:1], BOTH], "the forward of `head` when another is at the end of its backward"),
    ],
)
def test_every_call_is_compared_where_calls_can_wait(ways: list[Calls], where: str | None):
    words = "" if where is None else ADVICE.format(f" One rank is at {where}.")
    assert run_ranks(told, 2, ways, True) == [words] * 2


@pytest.mark.parametrize(
    ("change", "same"),
    [(lambda calls: calls, True), (lambda calls: calls[:3], False), (lambda calls: calls[::-1], False)],
)
def test_all_calls_of_a_step_are_compared_at_its_end(change: Callable[[Calls], Calls], same: bool):
    assert run_ranks(told, 2, [BOTH, change(BOTH)], False) == ["" if same else ADVICE.format("")] * 2
