"""What the watch for carried state finds, and that it leaves everything as it was set."""

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel.trainer.step.carried_state import CarriedState

ROWS = 3


class Keeps(nn.Module):
    """Keeps what it is given; a metric whose name begins another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.accumulator = MeanMetric(), nn.Identity()
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []


def test_lists_and_tensors_are_left_as_they_were_set():
    module = Keeps()
    held, watch = module.seen, CarriedState(module)
    values = [torch.randn(ROWS, 2) for _ in range(2)]
    for value in values:
        with watch.watching(ROWS):
            held.append(value)
            module.last = value
    watch.end()
    assert module.seen is held
    assert all(kept is value for kept, value in zip(held, values, strict=True))
    assert type(module.last) is Tensor and torch.equal(module.last, values[1])


def test_what_is_read_and_replaced_is_found_beside_a_metric_of_a_like_name():
    module = Keeps()
    watch, module.accumulator.state = CarriedState(module), torch.zeros(ROWS)
    with watch.watching(ROWS):
        module.accumulator.state = torch.ones(ROWS)
    with pytest.raises(ValueError, match=r"leaves `self.accumulator.state` behind"), watch.watching(ROWS):
        module.accumulator.state = module.accumulator.state + 1
    assert type(module.accumulator.state) is Tensor
