"""The modules and rows that the nets train. They are written here so that snapshots do not follow others' changes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parallel.demo.gpt import GPT

ROWS, WIDTH, CLASSES, TOKENS, VOCABULARY = 8, 6, 3, 6, 11


def gpt(**options: Any) -> GPT:
    """Four blocks, tied embeddings, AdamW with two groups."""
    small = {"vocabulary": VOCABULARY, "context": TOKENS, "width": 8, "num_blocks": 4, "num_heads": 2}
    return GPT(**{**small, "learning_rate": 1e-2, **options})


class Rows(LightningModule):
    """A classifier of rows of numbers: momentum, a schedule of the learning rate, two logged numbers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss)
        self.log("logits", logits.mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AdamRows(Rows):
    """AdamW, whose eps keeps gradients of rounding from becoming whole steps."""

    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.dim() < 2]
        others = [p for p in self.parameters() if p.dim() >= 2]
        groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def layers(count: int = 4, dropout: float = 0.0, norms: bool = True) -> nn.Sequential:
    """Linear layers, a normalisation and a function between them."""
    found: list[nn.Module] = []
    for _ in range(count - 1):
        norm = [nn.LayerNorm(WIDTH)] if norms else []
        found.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), *norm, nn.Tanh(), nn.Dropout(dropout)))
    return nn.Sequential(*found, nn.Linear(WIDTH, CLASSES))


def rows(count: int = 4, dropout: float = 0.0) -> Rows:
    """A `Rows` of so many layers."""
    return Rows(layers(count, dropout))


def adam_rows(count: int = 4) -> AdamRows:
    """An `AdamRows` of so many layers."""
    return AdamRows(layers(count))


class UNet(Rows):
    """Two blocks down, two up; an upper block also takes what a lower one returned."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = torch.tanh(block(torch.cat([x, skips.pop() * 0.5], dim=-1)))
        return self.head(x)


def batches(steps: int, copies: int = 1, place: int = 0, parts: int = 1) -> DataLoader:
    """Ready batches of one copy's share of the rows of each step, each cut into so many."""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        whole = {
            "input_ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }
        own = {name: value.chunk(copies)[place] for name, value in whole.items()}
        found += [{name: value.chunk(parts)[part] for name, value in own.items()} for part in range(parts)]
    return DataLoader(found, batch_size=None)
