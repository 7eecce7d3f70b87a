"""An integer tensor beside the hidden state was received as one that requires a gradient."""

import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, hidden: Tensor, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert ids.dtype == torch.int32 and not ids.requires_grad
        assert keep.dtype == torch.bool and not keep.requires_grad
        assert hidden.requires_grad == torch.is_grad_enabled()
        return self.layer(hidden) * keep[:, None] + self.table(ids), (ids + 1) % 9, keep


class HandsIdsOn(Classifier):
    """The ids exist on the first stage only: they are made from its hidden state."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Positioned() for _ in range(3)))
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x)
        ids, keep = hidden.detach().argmax(-1).to(torch.int32), hidden.detach().sum(-1) > 0
        for block in self.net:
            hidden, ids, keep = block(hidden, ids, keep)
        return self.head(hidden)


def test_ids_and_masks_travel_as_they_are():
    case = Case(HandsIdsOn, row_loader, {"stages": {"start": 0, "head": -1}})
    assert_parity(case, stages=(2, 3))
