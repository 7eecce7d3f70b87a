"""A value packed on one rank is the same on another: tensors of every kind, wherever they lie in it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.pipeline.transport.parcel import Parcel, unpack

CPU = torch.device("cpu")


@dataclass
class Holder:
    inside: Tensor


def there(value: Any) -> Any:
    return unpack(Parcel(value, CPU).taken(), CPU)


def test_tensors_arrive_as_they_were_wherever_they_lie():
    base = torch.randn(4, 6)
    tensors = [
        base, base.t(), base[:, ::2], base[0, 0], base[:0], base.bfloat16(), base.double(), base > 0,
        base.to(torch.int8), torch.view_as_complex(torch.randn(3, 2)).conj(),
        torch.tensor([float("nan"), -0.0]), torch.arange(3),
    ]  # fmt: skip
    found = there({"list": tensors, "object": Holder(base), "plain": [1, "two", None, (3.0,)]})
    assert found["plain"] == [1, "two", None, (3.0,)]
    assert torch.equal(found["object"].inside, base)
    for ours, theirs in zip(found["list"], tensors, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours, theirs) or theirs.isnan().any()
    assert there([]) == []


def test_a_tensor_that_is_there_twice_travels_once_and_without_its_graph():
    x = torch.randn(1000, requires_grad=True)
    frame, payload = Parcel([x, x * 2, x], CPU).taken()
    assert len(payload) == 2 * 4000 + 2 * (-4000 % 16)
    first, doubled, again = unpack((frame, payload), CPU)
    assert first.data_ptr() == again.data_ptr() and not doubled.requires_grad


def test_what_does_not_pickle_is_said():
    with pytest.raises(TypeError, match=r"A value that another rank needs cannot be sent to it: .*only what pickles"):
        Parcel({"f": lambda: None}, CPU)
