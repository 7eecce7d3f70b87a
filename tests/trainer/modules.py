"""The small modules and loaders that the tests of whole runs share. Each is what a user would write."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, VOCABULARY = 6, 3, 11
Shapes = Sequence[tuple[int, int]]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Classifier(LightningModule):
    """Any network on rows of ``WIDTH`` numbers; momentum, so that there is optimizer state to compare."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.net = network if network is not None else chain(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def chain(num_layers: int = 8, between: Callable[[], nn.Module] = nn.Tanh, width: int = WIDTH) -> nn.Sequential:
    """``num_layers`` linear layers with something between them, to ``CLASSES`` logits."""
    layers: list[nn.Module] = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(width, width), between()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Mlp(Classifier):
    """No container at all."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.fc3, self.fc4 = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(F.relu(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))))


def rows(sizes: Sequence[int] = (8, 8, 8), width: int = WIDTH, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Batches of rows of numbers with a class each."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, width, generator=g), torch.randint(CLASSES, (n,), generator=g)) for n in sizes]


def row_loader(sizes: Sequence[int] = (8, 8, 8), width: int = WIDTH, seed: int = 0) -> DataLoader:
    """A loader of ready batches of the given sizes."""
    return DataLoader(rows(sizes, width, seed), batch_size=None)


def row_dataset(num_rows: int, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> DataLoader:
    """A loader that cuts and shuffles for itself."""
    return DataLoader(TensorDataset(*rows([num_rows])[0]), batch_size, shuffle=shuffle, drop_last=drop_last)


def tokens(shapes: Shapes = ((8, 8), (8, 8), (8, 8)), vocabulary: int = VOCABULARY) -> list[Tensor]:
    """Batches of token ids int64 [B, T]."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, shape, generator=g) for shape in shapes]


def token_loader(
    shapes: Sequence[tuple[int, int]] = ((8, 8), (8, 8), (8, 8)), vocabulary: int = VOCABULARY
) -> DataLoader:
    """A loader of {"input_ids": ...} batches."""
    return DataLoader([{"input_ids": x} for x in tokens(shapes, vocabulary)], batch_size=None)
