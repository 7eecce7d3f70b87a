"""What hooks do to gradients that ZeRO divides, with tensors that are whole: as in one process, or refused in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.zero.native.partition import Options, Partition
from lightning_parallel.zero.ranks import Ranks
from lightning_parallel.zero.sharded_gradient import ShardedGradient, gather_gradient, total_norm
from tests.harness import run_ranks


def decay_in_place(p: nn.Parameter) -> None:
    p.grad.add_(p.data, alpha=0.1)


def decay_by_parameter(p: nn.Parameter) -> None:
    p.grad = p.grad + 0.1 * p


def noise(p: nn.Parameter) -> None:
    p.grad += torch.linspace(-1.0, 1.0, p.numel()).view(p.shape)


def masked(p: nn.Parameter) -> None:
    p.grad.mul_(p.data > 0)


def row_by_row(p: nn.Parameter) -> None:
    p.grad.mul_(torch.arange(float(p.shape[-1])))  # broadcast


def fused(p: nn.Parameter) -> None:
    torch._foreach_add_([p.grad], [p.data], alpha=0.1)


def blended(p: nn.Parameter) -> None:
    p.grad.lerp_(p.data, 0.1)


CHANGES = [decay_in_place, decay_by_parameter, noise, masked, row_by_row, fused, blended]


def changed(rank: int, stage: int) -> None:
    for change in CHANGES:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        partition = Partition(models[0], [optimizer], Ranks(rank, 2), Options(stage=stage, bucket_bytes=200))
        for model, announced in zip(models, (True, False), strict=True):
            loss = model(torch.ones(2, 5)).square().mean()
            if announced:
                with partition.reducer.backward():
                    loss.backward()
            else:
                loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    change(p)
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert isinstance(ours.grad, ShardedGradient)
            torch.testing.assert_close(gather_gradient(ours.grad), theirs.grad, msg=f"{change.__name__} {theirs.shape}")


@pytest.mark.parametrize("stage", [1, 2])
def test_whole_tensors_meet_a_rank_s_part_of_gradients(stage: int):
    """`grad.add_(parameter)` outside of a backward was taken for a gradient that waits to be reduced, and was lost."""
    run_ranks(changed, 2, stage)


def norms_of(rank: int, own: list[list[float]], whole: list[list[float]], orders: list[float]) -> list[Tensor]:
    parts = [ShardedGradient(torch.tensor(own[rank]), torch.zeros(sum(map(len, own))))]
    gradients = [*parts, *(torch.tensor(values) for values in whole)]
    return [total_norm(gradients, order, None) for order in orders]


@pytest.mark.parametrize("own", [[[3.0], []], [[], [3.0]], [[1.0, 2.0], [2.0]]], ids=["first", "last", "both"])
def test_norms_of_divided_and_whole_gradients_are_joined_by_their_order(own: list[list[float]]):
    """3 of what is divided and 4 of what is whole make 5; a rank that owns nothing asks the others all the same."""
    orders = [2.0, float("inf")]
    for norms in run_ranks(norms_of, 2, own, [[4.0]], orders):
        torch.testing.assert_close(norms, [torch.tensor(5.0), torch.tensor(4.0)])


def test_norms_of_divided_gradients_alone_and_of_other_orders():
    for norms in run_ranks(norms_of, 2, [[1.0, 2.0], [2.0]], [], [2.0, 1.0, 3.0]):
        torch.testing.assert_close(norms, [torch.tensor(3.0), torch.tensor(5.0), torch.tensor(17.0 ** (1 / 3))])


def step_by_hand(p: Tensor, gradient: Tensor) -> Any:
    return p.sub_(0.1 * gradient)


def into_the_parameter(p: Tensor, gradient: Tensor) -> Any:
    return torch.add(p, gradient, out=p)


def of_another(p: Tensor, gradient: ShardedGradient) -> Any:
    other = ShardedGradient(gradient.local[1:], p, gradient.group, gradient.begin + 1)
    return gradient.add_(other)


@pytest.mark.parametrize("use", [step_by_hand, into_the_parameter, of_another])
def test_parts_do_not_meet_whole_parameters(use: Callable[..., Any]):
    p = torch.zeros(3, 4)
    gradient = ShardedGradient(torch.ones(4), p, None, 4)  # as many elements as a row: they would be broadcast
    with pytest.raises(TypeError, match="A gradient that ZeRO divides among the ranks of 12 elements, 4 of them here"):
        use(p, gradient)
    assert not p.any()
