"""Tiny models of `transformers` and a demo of Lightning's, from configs with random weights, and batches for them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import Transformer
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

VOCABULARY, LABELS, LENGTH = 11, 3, 8
SIZES = (8, 6)
Batch = dict[str, Tensor]
Make = Callable[[], LightningModule]

ENCODER = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": LABELS, **ENCODER}
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "use_cache": False,
    "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_decoder_layers": 4,
    "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
RESNET = {
    "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": LABELS,
    "layer_type": "basic",
}  # fmt: skip
VIT = {"image_size": 16, "patch_size": 4, "num_labels": LABELS, **ENCODER}


class Supervised(LightningModule):
    """A model of `transformers` that computes its own loss; SGD, which shows a wrong gradient at its size."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Batch) -> Tensor:
        return self.model(**batch).loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Translation(Supervised):
    """The Transformer of Lightning's demos: one embedding for source and target."""

    def __init__(self) -> None:
        super().__init__(Transformer(VOCABULARY, ninp=16, nhead=2, nhid=32, nlayers=4, dropout=0.0))

    def loss(self, batch: Batch) -> Tensor:
        return F.nll_loss(self.model(batch["input_ids"], batch["labels"]), batch["labels"].flatten())


def tiny(model: str, config: str, options: dict[str, Any], checkpointing: bool = False) -> Make:
    """Builds a model from the names of its class and of its config's."""

    def make() -> Supervised:
        module = Supervised(getattr(transformers, model)(getattr(transformers, config)(**options)))
        if checkpointing:
            module.model.gradient_checkpointing_enable({"use_reentrant": False})
        return module

    return make


def _tokens(g: Generator, *shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=g)


def _classes(g: Generator, num_rows: int) -> Tensor:
    return torch.randint(LABELS, (num_rows,), generator=g)


def _lengths(g: Generator, num_rows: int) -> Tensor:
    """An attention mask int64 [B, T] of rows that end early."""
    return (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (num_rows, 1), generator=g)).long()


def _loader(batch: Callable[[Generator, int], Batch]) -> Callable[[], DataLoader]:
    def make() -> DataLoader:
        g = torch.Generator().manual_seed(0)
        return DataLoader([batch(g, num_rows) for num_rows in SIZES], batch_size=None)

    return make


texts = _loader(lambda g, n: {"input_ids": _tokens(g, n, LENGTH), "labels": _tokens(g, n, LENGTH)})
padded_texts = _loader(
    lambda g, n: {"input_ids": _tokens(g, n, LENGTH), "attention_mask": _lengths(g, n), "labels": _classes(g, n)}
)
placed_texts = _loader(
    lambda g, n: {
        "input_ids": _tokens(g, n, LENGTH),
        "attention_mask": _lengths(g, n),
        "labels": _tokens(g, n, LENGTH),
        "position_ids": torch.randint(LENGTH, (n, LENGTH), generator=g),
    }
)
images = _loader(lambda g, n: {"pixel_values": torch.randn(n, 3, 16, 16, generator=g), "labels": _classes(g, n)})
sounds = _loader(lambda g, n: {"input_features": torch.randn(n, 8, 16, generator=g), "labels": _tokens(g, n, LENGTH)})
