"""`nn.MultiheadAttention` slice by slice, beside torch's own on the whole sequence: values and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.token_slices.arguments import refuse_ahead
from lightning_parallel.pipeline.token_slices.attention import SlicedAttention
from lightning_parallel.pipeline.token_slices.lengths import Slices
from tests.unit.test_token_slices import T, X, checked

FORBIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = torch.arange(T) >= torch.tensor([[T], [T - 3]])  # [B, T]


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.double).masked_fill(mask, float("-inf"))


MASKS: dict[str, dict[str, Any]] = {
    "a hint": {"attn_mask": FORBIDDEN, "is_causal": True, "need_weights": False},
    "a bool mask": {"attn_mask": FORBIDDEN, "need_weights": False},
    "numbers": {"attn_mask": added(FORBIDDEN), "need_weights": False},
    "by head": {"attn_mask": FORBIDDEN.expand(8, T, T), "need_weights": False},
    "weights": {"attn_mask": FORBIDDEN},
    "weights and a hint": {"attn_mask": FORBIDDEN, "is_causal": True},
    "weights of heads": {"attn_mask": FORBIDDEN, "average_attn_weights": False},
    "padding": {"attn_mask": FORBIDDEN, "key_padding_mask": PADDED, "is_causal": True, "need_weights": False},
    "padding and weights": {"attn_mask": FORBIDDEN, "key_padding_mask": PADDED},
}


@pytest.mark.parametrize("kind", ["packed", "apart", "other widths", "no biases"])
@pytest.mark.parametrize("name", MASKS)
def test_slices_give_what_the_whole_gives(name, kind):
    options = {"no biases": {"bias": False}, "other widths": {"kdim": 6, "vdim": 10}}.get(kind, {})
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.double, **options)
    widths = {"packed": [16], "other widths": [16, 6, 10]}.get(kind, [16] * 3)
    of = [torch.randn(2, T, width, dtype=torch.double, requires_grad=True) for width in widths]
    inputs, given = of * 3 if kind == "packed" else of, MASKS[name]
    leaves = [*of, *module.parameters()]
    whole, weights = module(*inputs, **given)
    out = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, out)
    pieces, shares, before = [], [], []
    for start, end in Slices(3).bounds(T):
        part = [x[:, start:end] for x in of]
        mask = given["attn_mask"][..., start:end, :end]
        options = {**given, "attn_mask": mask}
        if "key_padding_mask" in given:
            options["key_padding_mask"] = PADDED[:, start:end]
        with SlicedAttention(before, end, T) as attention:
            piece, share = module(*(part * 3 if kind == "packed" else part), **options)
        before.append(attention.own)
        pieces.append(piece)
        shares.append(share)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(torch.autograd.grad(torch.cat(pieces, 1), leaves, out), expected)
    assert (shares[0] is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(torch.cat(shares, -2), weights)


class Attending(nn.Module):
    """A block that calls an `nn.MultiheadAttention` as it is told."""

    def __init__(self, masked: bool = True, **options: Any) -> None:
        super().__init__()
        self.attention, self.masked = nn.MultiheadAttention(16, 2, **{"batch_first": True, **options}), masked

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(x, x, x, attn_mask=mask if self.masked else None)[0]


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)


@pytest.mark.parametrize("mask", [FORBIDDEN, added(FORBIDDEN).float()], ids=["bool", "numbers"])
@pytest.mark.parametrize("block", [layer(), layer(norm_first=True, dropout=0.0), Attending(), Attending(dropout=0.5)])
def test_causal_blocks_pass(block, mask):
    assert checked(block, X, mask) == T


NOT_BATCHED = r"Block `0` does not compute on slices of a sequence"
REFUSED = {
    "no mask": (Attending(masked=False), FORBIDDEN, "attention that is not causal"),
    "one that looks ahead": (Attending(), FORBIDDEN.T, r"A mask that `0` is called with lets positions see later ones"),
    "positions first": (Attending(batch_first=False), torch.zeros(2, 2), NOT_BATCHED),
    "biases of keys": (Attending(add_bias_kv=True), FORBIDDEN, r"nn\.MultiheadAttention\(add_bias_kv=True\)"),
    "added zeros": (Attending(add_zero_attn=True), FORBIDDEN, r"or \(add_zero_attn=True\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_causal_is_refused_by_name(name):
    block, mask, words = REFUSED[name]
    with pytest.raises(PhantomError, match=words):
        checked(block, X, mask)


class Both(Attending):
    """Beside it, torch's function with the same mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)[:, 0]


def test_a_bool_mask_with_two_meanings_is_refused_and_one_of_numbers_is_not():
    with pytest.raises(PhantomError, match=r"a bool mask of scaled_dot_product_attention, which says what is allowed"):
        checked(Both(), X, FORBIDDEN)
    assert checked(Both(), X, added(FORBIDDEN).double()) == T


def test_true_says_the_opposite_in_the_two_kinds_of_bool_masks():
    refuse_ahead("0", FORBIDDEN, T, forbids=True)
    refuse_ahead("0", ~FORBIDDEN, T)
    for mask, forbids in ((~FORBIDDEN, True), (FORBIDDEN, False)):
        with pytest.raises(PhantomError, match="lets positions see later ones"):
            refuse_ahead("0", mask, T, forbids)
