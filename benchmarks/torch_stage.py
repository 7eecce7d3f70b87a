"""One stage's share of the demo's GPT, as torch.distributed.pipelining wants it: tensor in, tensor out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.demo.gpt import GPT


class TorchStage(nn.Module):
    """Stage `stage` of `num_stages` with an equal number of blocks."""

    def __init__(self, model: GPT, stage: int, num_stages: int) -> None:
        super().__init__()
        bounds = [s * len(model.blocks) // num_stages for s in range(num_stages + 1)]
        self.first, self.last = stage == 0, stage == num_stages - 1
        self.embedding, self.position = (model.embedding, model.position) if self.first else (None, None)
        self.blocks = nn.ModuleList(model.blocks[bounds[stage] : bounds[stage + 1]])
        self.norm, self.head = (model.norm, model.head) if self.last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token: logits [B, T, V], tokens int64 [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
