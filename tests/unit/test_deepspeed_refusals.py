"""What DeepSpeed cannot send or divide is refused by name, before it is asked to."""

import pytest
from torch import nn, ones

from lightning_parallel.zero.deepspeed.engine import refuse_parameters


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale


def test_a_parameter_without_a_dimension_is_refused_and_one_with_one_is_not():
    with pytest.raises(ValueError, match=r"parameter `scale` has no dimension.*torch\.ones\(1\).*engine=\"native\""):
        refuse_parameters(Scaled(nn.Parameter(ones(()))))
    refuse_parameters(Scaled(nn.Parameter(ones(1))))


def test_sparse_gradients_are_refused_and_dense_ones_are_not():
    with pytest.raises(ValueError, match=r"the gradients of `0` are sparse.*Use sparse=False"):
        refuse_parameters(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    refuse_parameters(nn.Sequential(nn.Embedding(3, 2)))
