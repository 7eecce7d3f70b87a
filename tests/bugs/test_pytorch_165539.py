"""The sender computed in bfloat16, the receiver expected float32: the bits were read as the other type."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.modules import WIDTH, Classifier, chain, row_loader
from tests.trainer.pipelines import BF16, Case, assert_parity, failure_of


class Lower(nn.Module):
    """Computes and returns bfloat16, as a block under autocast of its own does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.on):
            return self.layer(x)


class Higher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = chain(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float())


class Mixed(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(Lower(), Higher()))


class Alternates(Mixed):
    """Another dtype every other batch of the same shapes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[0].on = batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)


def test_autocast_in_the_first_stage_only():
    assert_parity(Case(Mixed, row_loader), stages=(2,), loss=BF16, weights=BF16)


def test_a_dtype_that_changes_between_steps_is_named_or_agreed_anew():
    case = Case(Alternates, row_loader, validate=False)
    assert failure_of(case) == (
        "Stage 0 sends torch.float32 (2, 6) where it sent torch.bfloat16 (2, 6) before for a batch of the same shapes."
        " Set PipelineStrategy(dynamic_shapes=True) to agree on every transfer anew."
    )
    assert_parity(case.but({"dynamic_shapes": True}), stages=(2,), loss=BF16, weights=BF16)
