"""Functions that run in turns: they meet, keep what is theirs, and end when one fails."""

import threading

import pytest
import torch

from lightning_parallel.pipeline.runtime.turns import in_turn, meet, run_in_turns, swap_of


class Once:
    value = 0


def test_each_keeps_what_is_its_own_and_nothing_stays_outside():
    seen = []

    def function(number: int) -> int:
        Once.value = number
        torch.set_default_dtype(torch.float64 if number else torch.float32)
        with torch.no_grad() if number else torch.enable_grad():
            got = meet(number)
            seen.append((Once.value, torch.get_default_dtype(), torch.is_grad_enabled(), got))
        return Once.value

    assert run_in_turns([lambda: function(0), lambda: function(1)], lambda x: x[::-1], [swap_of(Once, "value")]) == [
        0,
        1,
    ]
    assert seen == [(0, torch.float32, True, 1), (1, torch.float64, False, 0)]
    assert Once.value == 0 and torch.get_default_dtype() == torch.float32 and not in_turn()


@pytest.mark.parametrize("where", ["before", "behind", "together"])
def test_when_one_fails_the_others_end(where: str):
    count, left = threading.active_count(), []

    def function(number: int) -> None:
        try:
            if where == "before" and number:
                raise KeyError(number)
            meet(number)
            if where == "behind":
                raise KeyError(number)
        finally:
            left.append(number)

    def together(brought: list[int]) -> list[int]:
        if where == "together":
            raise KeyError(1)
        return brought

    with pytest.raises(KeyError):
        run_in_turns([lambda: function(0), lambda: function(1)], together)
    assert sorted(left) == [0, 1] and threading.active_count() == count
