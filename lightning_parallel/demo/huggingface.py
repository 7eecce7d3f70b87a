"""GPT-2 and Llama of ``transformers``, tiny, from a config, with random weights: their code, not one line changed."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

Batch = dict[str, Tensor]


class HuggingFaceLM(LightningModule):
    """A causal language model of ``transformers``; a batch is {"input_ids": int64 [B, T]} with T <= ``context``.

    Args:
        architecture: ``"gpt2"`` (head tied to the embedding) or ``"llama"`` (rotary positions, not tied).
        vocabulary: number of tokens; 256 for bytes.
        context: most positions.
        width: features of a token, a multiple of ``num_heads``.
        num_blocks: transformer blocks.
        num_heads: attention heads a block.
        dropout: probability, everywhere that the architecture has one.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        architecture: Literal["gpt2", "llama"] = "gpt2",
        vocabulary: int = 256,
        context: int = 128,
        width: int = 64,
        num_blocks: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        build = {"gpt2": _gpt2, "llama": _llama}[architecture]
        self.model = build(vocabulary, context, width, num_blocks, num_heads, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B, T] to logits [B, T, vocabulary]."""
        return self.model(input_ids=tokens).logits

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
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def _loss(self, batch: Batch) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def _gpt2(vocabulary: int, context: int, width: int, num_blocks: int, num_heads: int, dropout: float) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=num_blocks,
        n_head=num_heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _llama(vocabulary: int, context: int, width: int, num_blocks: int, num_heads: int, dropout: float) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=context,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
        attention_dropout=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)
