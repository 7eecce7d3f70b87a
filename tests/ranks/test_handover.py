"""Gradients are given to DeepSpeed in one order, whatever the order in which a rank makes them."""

import torch
from torch import nn

from lightning_parallel.zero.deepspeed.order import Handover
from tests.harness import run_ranks


def handed_over(rank: int) -> list[list[int]]:
    """What was handed over in three backwards; behind -1 at their end. Rank 1 makes other gradients in the first."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    handed: list[int] = []
    order = Handover(parameters, lambda p: handed.append(next(i for i, q in enumerate(parameters) if q is p)))
    found = []
    for made in (((2, 0, 1), (0, 3))[rank], (2, 3), (0, 2, 1, 3)):
        for i in made:
            parameters[i].grad = torch.ones(1)
            order.made(parameters[i])
        begun = len(handed)
        order.finish()
        found.append([*handed[:begun], -1, *handed[begun:]])
        handed.clear()
    return found


def test_gradients_are_handed_over_in_the_order_of_rank_0_s_first_backward():
    """The first backward goes by the order of registration. What a rank has not made is handed over as zeros."""
    later = [[2, -1, 0, 1, 3], [2, 0, 1, 3, -1]]
    first, second = run_ranks(handed_over, 2)
    assert first == [[0, 1, 2, -1, 3], *later]
    assert second == [[0, -1, 1, 2, 3], *later]
