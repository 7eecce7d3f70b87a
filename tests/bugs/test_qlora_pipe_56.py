"""A wholly frozen stage ended the run: the loss, or what it received, does not require a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class WithAdapter(nn.Module):
    """A frozen layer beside a trained one of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class Frozen(Classifier):
    """Four blocks and a head; the named parts are frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__(nn.Sequential(*(WithAdapter() for _ in range(3)), nn.Linear(WIDTH, CLASSES)))
        first, last = self.net[:2], self.net[2:]
        for part in {"first": [first], "last": [last], "all but the first block": [self.net[1:]], "adapters only": []}[
            frozen
        ]:
            part.requires_grad_(False)
        if frozen == "adapters only":
            self.net[3].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("frozen", ["first", "last", "all but the first block", "adapters only"])
def test_frozen_stages_train_what_is_left(frozen: str):
    trained = {name for name, p in Frozen(frozen).named_parameters() if p.requires_grad}
    for record in assert_parity(Case(lambda: Frozen(frozen), row_loader, {"partition": "count"})):
        moved = {name for name, value in record.weights.items() if not torch.equal(value, record.initial[name])}
        assert moved == trained
