"""A closed parameter in a forward: whoever reads it is lent the whole, whoever writes to it is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.zero.closed_parameters import Closed, KeptPart, close, lend_in_forward, reopen

WHOLE = torch.arange(6.0).view(2, 3) + 1


@pytest.fixture
def closed() -> Iterator[nn.Parameter]:
    """A parameter without its values, in a forward."""
    parameter = nn.Parameter(torch.full((2, 3), float("nan")))
    close(parameter, KeptPart("layer.weight", WHOLE.flatten()[:3], 0, 3, None))

    def lend(asked: nn.Parameter) -> None:
        assert asked is parameter
        asked.data = WHOLE.clone()
        reopen(asked)

    lend_in_forward(lend)
    yield parameter
    lend_in_forward(None)


READS: dict[str, Callable[[Any], Tensor]] = {
    "an operator": lambda w: w * 1,
    "an operator of others": lambda w: torch.zeros(2, 3).add(w),
    "a list": lambda w: torch.cat([w]),
    "detach": lambda w: w.detach(),
    "a cast": lambda w: w.double().float(),
    "a view": lambda w: w.T.T,
    "an index": lambda w: w[:],
}


@pytest.mark.parametrize("how", READS)
def test_who_reads_is_lent_the_whole(closed: nn.Parameter, how: str):
    assert torch.equal(READS[how](closed), WHOLE) and type(closed) is nn.Parameter


def test_gradients_of_what_was_lent_are_the_parameters(closed: nn.Parameter):
    closed.square().sum().backward()
    assert closed.grad is not None and torch.equal(closed.grad, 2 * WHOLE)


def test_who_asks_for_the_shape_is_lent_nothing(closed: nn.Parameter):
    assert closed.shape == (2, 3) and closed.numel() == 6 and closed.dtype is torch.float32
    assert isinstance(closed, Closed)


WRITES: dict[str, Callable[[Any], Any]] = {
    "an operator in place": lambda w: w.mul_(2),
    "assigned to": lambda w: w.__setitem__(0, 1.0),
    "several": lambda w: torch._foreach_mul_([w], 2.0),
    "data": lambda w: w.data.mul_(2),
    "an assignment": lambda w: w.__imul__(2),
}


@pytest.mark.parametrize("how", WRITES)
@torch.no_grad()
def test_who_writes_is_refused(closed: nn.Parameter, how: str):
    with pytest.raises(
        ValueError, match=r"reads parameter `layer\.weight`, of which zero_stage=3 leaves this rank a part"
    ):
        WRITES[how](closed)
    assert isinstance(closed, Closed)
