"""Handwritten digits, 8x8 pixels, as they come with scikit-learn, and a perceptron that reads them."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

Batch = tuple[Tensor, Tensor]


class DigitsDataModule(LightningDataModule):
    """1536 digits to train on, 256 to validate on; a batch is (pixels float32 [B, 64] in 0..1, digit int64 [B]).

    Args:
        batch_size: rows a batch. 64 divides both parts, so that every batch is whole.
        num_workers: processes that load; 0 loads in the training process.
    """

    num_train, num_validation = 1536, 256

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        x = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16
        y = torch.as_tensor(digits, dtype=torch.int64)[order]
        end = self.num_train + self.num_validation
        self.train = TensorDataset(x[: self.num_train], y[: self.num_train])
        self.validation = TensorDataset(x[self.num_train : end], y[self.num_train : end])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader(self.validation)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def _loader(self, data: Dataset[tuple[Tensor, ...]], shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(data, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


class DigitsClassifier(LightningModule):
    """A multi-layer perceptron 64 -> width -> ... -> width -> 10 in one ``nn.Sequential``.

    Args:
        width: units of each hidden layer.
        num_layers: linear layers in all, >= 2.
        dropout: probability that a hidden unit is dropped while training; 0 leaves dropout out.
        batch_norm: whether hidden units are normalised over the batch.
        learning_rate: of Adam.
    """

    def __init__(
        self,
        width: int = 128,
        num_layers: int = 8,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        layers: list[nn.Module] = []
        for inputs in (64, *[width] * (num_layers - 2)):
            layers += [nn.Linear(inputs, width), *([nn.BatchNorm1d(width)] if batch_norm else []), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Pixels float [B, 64] to logits [B, 10]."""
        return self.net(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log(f"{stage}_accuracy", (logits.argmax(-1) == y).float().mean(), prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
