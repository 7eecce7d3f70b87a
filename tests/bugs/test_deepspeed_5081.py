"""Of a batch that is a dict or a tuple only the first field arrived."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.trainer.modules import Classifier, rows
from tests.trainer.pipelines import Case, assert_parity


class UsesEveryField(Classifier):
    def loss(self, batch: Any) -> Tensor:
        assert type(batch) is tuple and len(batch) == 4
        x, y, extra, weights = batch
        assert sorted(extra) == ["epsilon", "k", "names"] and extra["k"] == 2 and extra["epsilon"] == 0.1
        assert len(x) == len(y) == len(extra["names"]) == len(weights)
        lengths = torch.tensor([len(name) for name in extra["names"]])[:, None]
        losses = F.cross_entropy(self(x * extra["k"] + lengths), y, label_smoothing=extra["epsilon"], reduction="none")
        return (losses * weights).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))


def loader() -> DataLoader:
    batches = [
        (x, y, {"k": 2, "epsilon": 0.1, "names": ["n" * (i % 4) for i in range(len(x))]}, torch.rand(len(x)))
        for x, y in rows((8, 8, 5))
    ]
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


def test_the_step_sees_every_field():
    torch.manual_seed(0)
    made = loader()
    assert_parity(Case(UsesEveryField, lambda: made), stages=(2,))
