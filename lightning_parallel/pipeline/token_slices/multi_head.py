"""`nn.MultiheadAttention` on a slice: torch's function fixes every size, so it is written out here.

The one idea: keys and values are kept as they come out of their products, so that no later slice makes them again.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_parallel.pipeline.phantoms.errors import PhantomError

if TYPE_CHECKING:
    from lightning_parallel.pipeline.token_slices.attention import SlicedAttention

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


class MultiHead:
    """A call of `F.multi_head_attention_forward`.

    Args:
        args, kwargs: its arguments; query, key and value are [t, B, E].
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        self.given: dict[str, Any] = dict(bound.arguments)
        self.dropout = bound.arguments["dropout_p"] if bound.arguments["training"] else 0.0

    def without_dropout(self) -> MultiHead:
        """The same, with dropout that drops nothing."""
        return MultiHead((), {**self.given, "dropout_p": 0.0})

    def whole(self) -> Any:
        """What torch's function returns."""
        return F.multi_head_attention_forward(**self.given)

    def on_slice(self, attention: SlicedAttention) -> tuple[Tensor, Tensor | None]:
        """What it returns for the positions of a slice, whose keys are those of earlier ones too.

        Returns:
            [t, B, E]; and, if weights are asked for, [B, t, T] or [B, H, t, T], 0 for keys behind the slice.

        Raises:
            PhantomError: it is not causal, or some keys are no position's.
        """
        if self.given["key"].shape[0] != self.given["query"].shape[0]:  # to something else than the sequence
            return self.whole()
        by_hint = self.given["is_causal"] and not self.given["need_weights"] and self.given["key_padding_mask"] is None
        self._refuse(attention, by_hint)
        q, k, v = self._projected()
        key, value, padding = attention.with_earlier(k, v, self._padding(q.dtype))
        if key.shape[-2] != attention.end:
            raise PhantomError("nn.MultiheadAttention(batch_first=False): positions have to be in dim 1")
        shares: Tensor | None = None
        if by_hint:
            y = attention.causal(q, key, value, self.dropout)
        elif not self.given["need_weights"]:
            y = F.scaled_dot_product_attention(q, key, value, self._mask(padding, q), self.dropout)
        else:
            scores = q @ key.mT / math.sqrt(q.shape[-1]) + self._mask(padding, q)
            shares = F.dropout(scores.softmax(-1), self.dropout)
            y = shares @ value
        y = F.linear(y.permute(2, 0, 1, 3).flatten(2), self.given["out_proj_weight"], self.given["out_proj_bias"])
        return y, None if shares is None else self._shown(shares, attention)

    def _refuse(self, attention: SlicedAttention, by_hint: bool) -> None:
        given = self.given
        if given["query"].dim() != 3 or given["static_k"] is not None or given["static_v"] is not None:
            raise PhantomError("nn.MultiheadAttention of one row alone, or with keys of its own")
        if given["bias_k"] is not None or given["add_zero_attn"]:
            raise PhantomError("nn.MultiheadAttention(add_bias_kv=True) or (add_zero_attn=True)")
        if not by_hint:
            attention.refuse_mask(given["attn_mask"])

    def _projected(self) -> list[Tensor]:
        """Query, key and value of a slice [B, H, t, E / H]."""
        given = self.given
        inputs = [given["query"], given["key"], given["value"]]
        if given["use_separate_proj_weight"]:
            weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        elif inputs[0] is inputs[1] is inputs[2]:
            of_all = F.linear(inputs[0], given["in_proj_weight"], given["in_proj_bias"]).chunk(3, -1)
            return [self._of_heads(y) for y in of_all]
        else:
            weights = list(given["in_proj_weight"].chunk(3))
        biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
        return [self._of_heads(F.linear(*of)) for of in zip(inputs, weights, biases, strict=True)]

    def _of_heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.given["num_heads"], -1)).permute(1, 2, 0, 3)

    def _padding(self, dtype: torch.dtype) -> Tensor | None:
        padding = self.given["key_padding_mask"]
        return None if padding is None else _added(padding, dtype)

    def _mask(self, padding: Tensor | None, q: Tensor) -> Tensor:
        """What is added to scores [B, H, t, keys]."""
        mask = _added(self.given["attn_mask"], q.dtype)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (-1, q.shape[1]))
        return mask if padding is None else mask + padding[:, None, None]

    def _shown(self, shares: Tensor, attention: SlicedAttention) -> Tensor:
        shares = F.pad(shares, (0, attention.length - attention.end))
        return shares.mean(1) if self.given["average_attn_weights"] else shares


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, True where attention is forbidden, as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
