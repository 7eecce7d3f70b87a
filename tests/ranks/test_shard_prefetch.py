"""`prefetch=` of FSDP2's engine: blocks are gathered ahead of their turn, and nothing else changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_parallel.zero.fsdp2.gradients import groups_of
from lightning_parallel.zero.fsdp2.sharding import Sharding
from tests.harness import run_ranks

BLOCKS, WIDTH = 3, 4


def trained(rank: int, prefetch: Any) -> tuple[list[str], Tensor]:
    """What happened in the second step of two, in order, and the weights afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (2,))
    sharding = Sharding(model, list(model), [model], prefetch=prefetch, mesh=mesh, reshard_after_forward=True)
    events: list[str] = []

    def noted(what: str, gather: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not group.is_sharded:
                return gather(*args, **kwargs)
            events.append(what)
            return gather(*args, **kwargs)

        [group] = groups_of(model[number])
        return run

    for number, block in enumerate(model):
        [group] = groups_of(block)
        group.unshard = noted(f"gather {number}", group.unshard)
        block.register_forward_pre_hook(lambda *_, number=number: events.append(f"forward {number}"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        events.clear()
        model(torch.ones(2, WIDTH) * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharding.undo()
    return events, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def runs() -> Any:
    return {prefetch: run_ranks(trained, 2, prefetch)[0] for prefetch in ("none", "forward", "both")}


def test_weights_are_the_same(runs: Any):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(model(torch.ones(2, WIDTH) * (1 + rank)).square().mean() for rank in range(2)).div(2).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for _, weights in runs.values():
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("prefetch", ["none", "forward", "both"])
def test_the_block_behind_is_gathered_before_a_block_computes(runs: Any, prefetch: str):
    events, _ = runs[prefetch]
    ahead = [events.index(f"gather {number + 1}") < events.index(f"forward {number}") for number in range(BLOCKS - 1)]
    assert ahead == [prefetch != "none"] * (BLOCKS - 1)


def test_on_both_ways_a_backward_names_the_block_before():
    def named(rank: int) -> list[list[bool]]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        Sharding(model, list(model), [model], prefetch="both", mesh=init_device_mesh("cpu", (2,)))
        states = [block._get_fsdp_state() for block in model]
        return [[other is s for s in states] for state in states for other in state._states_to_backward_prefetch]

    assert run_ranks(named, 2)[0] == [[True, False, False], [False, True, False]]
