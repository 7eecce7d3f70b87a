"""Recomputation drew another dropout mask than the forward."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, on_stages


class Drops(Classifier):
    recompute = True

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        super().__init__(nn.ModuleList(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Keeps(Drops):
    recompute = False


def test_recomputed_masks_are_those_of_the_forward_and_runs_repeat():
    for num_stages in (2, 4):
        recomputed, again, kept = (
            on_stages(Case(make, row_loader, {"schedule": "gpipe"}), num_stages)[0] for make in (Drops, Drops, Keeps)
        )
        for other in (again, kept):
            assert torch.equal(torch.stack(other.losses), torch.stack(recomputed.losses))
            assert all(torch.equal(other.weights[name], value) for name, value in recomputed.weights.items())
