"""A decoder-only transformer written out by hand, as one would for a small project of one's own.

It has on purpose what makes a model awkward to cut: embeddings tied to the head, learned positions, and a mask made
in ``forward`` that every block reads.
"""

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

# Shape suffixes: B rows, T positions, C width, H heads, V vocabulary.
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and added after: [B, T, C] to [B, T, C]."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask`` is bool [T, T], True where attention is allowed; none is the causal mask, without making it."""
        x = x + self._drop(self._attend(self.norm_1(x), mask))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")))

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(LightningModule):
    """A GPT that predicts the next token; a batch is {"input_ids": int64 [B, T]} with T <= ``context``.

    Args:
        vocabulary: number of tokens; 256 for bytes.
        context: most positions.
        width: features of a token, a multiple of ``num_heads``.
        num_blocks: transformer blocks.
        num_heads: attention heads a block.
        dropout: probability in attention and on both residual branches.
        learning_rate: of AdamW.
        tie_embeddings: whether the head shares the embedding's weight.
        explicit_mask: make the causal mask in ``forward`` and hand it to every block; ``False`` lets the attention
            kernel know that it is causal, which is faster on a GPU and the same arithmetic.

    Raises:
        ValueError: ``num_heads`` does not divide ``width``; in ``forward``, T exceeds ``context``.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 128,
        width: int = 128,
        num_blocks: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        tie_embeddings: bool = True,
        explicit_mask: bool = True,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"GPT(width={width}, num_heads={num_heads}): the heads must divide the width.")
        self.save_hyperparameters()
        self.context = context
        self.learning_rate = learning_rate
        self.explicit_mask = explicit_mask
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise()
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Normal weights of deviation 0.02, smaller where a residual branch ends, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                branch_end = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if branch_end else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B, T] to logits [B, T, V]."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"GPT(context={self.context}) got rows of {length} tokens. Shorten them or raise context.")
        mask = None
        if self.explicit_mask:
            mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        x = self.embedding(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def _loss(self, batch: Batch) -> Tensor:
        tokens = batch["input_ids"]
        logits = self(tokens)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely next token of each row, int64 [B]."""
        return self(batch["input_ids"])[:, -1].argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
