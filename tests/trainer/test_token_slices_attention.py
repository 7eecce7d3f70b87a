"""TeraPipe with torch's own attention modules as they are: `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.demo import GPT
from tests.trainer.modules import token_loader
from tests.trainer.pipelines import assert_same, failure_of, on_stages, one_process
from tests.trainer.test_token_slices import assert_sliced, case


class Encoders(GPT):
    """A language model of `nn.TransformerEncoderLayer`s, with SGD; `padded`: a micro-batch hides its last tokens."""

    def __init__(
        self, whole: bool = False, padded: bool = False, dropout: float = 0.0, hint: bool = True, vocabulary: int = 11
    ) -> None:
        super().__init__(vocabulary=vocabulary, context=16, width=16, num_heads=2, num_blocks=4)
        layers = [
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=bool(n % 2)) for n in range(4)
        ]
        self.blocks = nn.ModuleList(layers)
        self.whole, self.padded, self.hint = whole, padded, hint
        if whole:
            self.blocks = nn.TransformerEncoder(layers[0], 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        padding = torch.zeros(tokens.shape).masked_fill((tokens == 3).cumsum(1) > 2, float("-inf"))
        options: dict[str, Any] = {
            "src_key_padding_mask": padding if self.padded else None,
            "is_causal": self.hint and not self.padded,
        }
        x = self.embedding(tokens) + self.position(torch.arange(length))
        if self.whole:
            return self.head(self.norm(self.blocks(x, mask, **options)))
        for block in self.blocks:
            x = block(x, mask, **options)
        return self.head(self.norm(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Block(nn.Module):
    """`nn.MultiheadAttention` as most people call it, with weights that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask)[0]
        return x + self.down(self.up(x).relu())


class ByHand(Encoders):
    """The same of blocks of one's own and a bool mask, True where attention is forbidden; `open`: now and then not."""

    def __init__(self, opens: bool = False) -> None:
        super().__init__()
        self.blocks, self.opens = nn.ModuleList(Block() for _ in range(4)), opens

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.open = self.opens and batch_idx == 2
        return super().training_step(batch, batch_idx)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        mask[:3, :3] &= not getattr(self, "open", False)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


MODELS: dict[str, tuple[Any, int]] = {
    "layers": (Encoders, 2),
    "layers, 4": (Encoders, 4),
    "layers without a hint": (lambda: Encoders(hint=False), 2),
    "nn.TransformerEncoder": (lambda: Encoders(whole=True), 2),
    "padded": (lambda: Encoders(padded=True), 2),
    "padded nn.TransformerEncoder": (lambda: Encoders(whole=True, padded=True), 2),
    "by hand": (ByHand, 2),
}


@pytest.mark.parametrize("name", [n if n == "layers" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_attention_modules_are_one_process(name):
    make, num_stages = MODELS[name]
    run = case(make, lambda: token_loader(((8, 9),) * 6))
    records = on_stages(run, num_stages)
    assert_same(records, one_process(run))
    assert_sliced(records)


@pytest.mark.slow
def test_masks_of_dropout_are_the_same_on_any_number_of_stages():
    run = case(lambda: Encoders(dropout=0.2))
    assert_same(on_stages(run, 4), on_stages(run, 2)[0])


@pytest.mark.slow
def test_a_mask_that_opens_later_is_refused():
    run = case(lambda: ByHand(opens=True)).but(trainer={"accumulate_grad_batches": 1})
    assert "A mask that `blocks.0` is called with lets positions see later ones" in failure_of(run)
