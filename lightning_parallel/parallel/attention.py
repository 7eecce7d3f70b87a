"""`nn.MultiheadAttention` with this rank's heads: its own code fixes every size, so it has a forward of ours.

The one idea: query, key and value are three column-wise products kept in one parameter, of which a rank has its heads'
rows; `out_proj` is the row-wise one behind them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.operators import sum_over_ranks
from lightning_parallel.parallel.styles import CutPart


def refuse_attention(module: nn.MultiheadAttention, name: str, size: int) -> None:
    """Raise for what `Heads` does not do.

    Raises:
        ValueError: the ranks do not divide the heads; keys or values of other widths, biases of keys, added zeros.
    """
    if module.num_heads % size:
        raise ValueError(
            f"`{name}` has num_heads={module.num_heads}, which {size} ranks of the tensor axis do not divide. Choose a"
            " tensor_parallel_size that divides the heads."
        )
    if not can_share_heads(module):
        raise ValueError(
            f"`{name}` is an nn.MultiheadAttention with kdim=, vdim=, add_bias_kv=True or add_zero_attn=True, whose"
            " heads are not shared among ranks. Leave it out of tensor_plan."
        )


def can_share_heads(module: nn.MultiheadAttention) -> bool:
    """Whether `Heads` does what the module does."""
    return module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn


class Heads:
    """The forward of `nn.MultiheadAttention` with num_heads / ranks heads."""

    _tensor_part: CutPart

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As there; the weights are the average over the heads of all ranks."""
        if need_weights and not average_attn_weights:
            raise ValueError(
                f"`{self._tensor_part.name}` is asked for the attention weights of every head, of which a rank has some"
                " (tensor parallelism). Use average_attn_weights=True or need_weights=False."
            )
        region = self._tensor_part.region
        region.open()
        try:
            q, k, v = self._projected(query, key, value)
            mask = _mask(key_padding_mask, attn_mask, q, region.axis)
            weights = None
            if need_weights:
                scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
                shares = F.softmax(scores if mask is None else scores + mask, -1)
                y = F.dropout(shares, self.dropout, self.training) @ v
                weights = sum_over_ranks(shares.mean(1) / region.axis.size, region.axis)
            else:
                y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
            y = self.out_proj(y.transpose(-3, -2).flatten(-2))
        finally:
            region.close()
        y = y.squeeze(0) if query.dim() == 2 else y if self.batch_first else y.transpose(0, 1)
        return y, weights.squeeze(0) if weights is not None and query.dim() == 2 else weights

    def _projected(self: Any, *inputs: Tensor) -> list[Tensor]:
        """Query, key and value [rows, heads, positions, features of a head]."""
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        part, found = self._tensor_part, []
        for x, weight, bias in zip(inputs, self.in_proj_weight.chunk(3), biases, strict=True):
            y = F.linear(part.region.enter(x, part.number, self.training), weight, bias)
            y = y.unsqueeze(0) if x.dim() == 2 else y if self.batch_first else y.transpose(0, 1)
            found.append(y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        return found


def _mask(padding: Tensor | None, mask: Tensor | None, q: Tensor, axis: TensorAxis) -> Tensor | None:
    """Both masks as one that is added to scores [rows, heads, positions, keys]."""
    added: Tensor | None = None
    if mask is not None:
        added = _additive(mask, q.dtype)
        if added.dim() == 3:  # of every head: this rank's
            added = added.view(q.shape[0], -1, *added.shape[1:]).chunk(axis.size, 1)[axis.rank]
    if padding is not None:
        padded = _additive(padding, q.dtype).view(q.shape[0], 1, 1, -1)
        added = padded if added is None else added + padded
    return added


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, True where attention is forbidden, as numbers."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
