"""Pieces of a batch normalised together are the batch normalised by torch, gradients too."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_parallel.parallel.batch_statistics import BatchStatistics, normalise


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4), (7, 3, 2, 5), (7, 3, 2, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_pieces_are_the_whole_batch(shape: tuple[int, ...], affine: bool):
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    weight, bias = (
        (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)) if affine else (None,) * 2
    )
    wanted = F.batch_norm(x, None, None, weight, bias, True, eps=1e-3)
    pieces = x.split([3, 3, 1])
    found = torch.cat(normalise(pieces, BatchStatistics.of(pieces), weight, bias, 1e-3))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    towards, inputs = torch.randn_like(wanted), [of for of in (x, weight, bias) if of is not None]
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, towards), torch.autograd.grad(wanted, inputs, towards), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("momentum", [None, 0.2])
def test_running_statistics_are_torchs(momentum: float | None):
    ours, theirs = (nn.BatchNorm1d(3, momentum=momentum) for _ in range(2))
    for seed in range(3):
        x = 100 + torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        theirs(x)
        BatchStatistics.of(x.split(3)).update(ours)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused_by_torch():
    x = torch.randn(4, 2, requires_grad=True)
    [y] = normalise([x], BatchStatistics.of([x.detach()]), None, None, 1e-5)
    [first] = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
