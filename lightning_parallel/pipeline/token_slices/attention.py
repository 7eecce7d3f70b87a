"""Causal attention of a slice: its queries see the keys and values of the slices before it.

The one idea: inside a block's call `scaled_dot_product_attention` is intercepted. The keys and values of earlier slices
are put in front of those of this one, and the causal mask is aligned with the last key. Attention that is not causal is
refused: what it reads comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.phantoms.errors import PhantomError

KeysAndValues = list[tuple[Tensor, Tensor]]  # of every attention in a block, in the order of their calls


class SlicedAttention(TorchFunctionMode):
    """While it is entered, a block is called with one slice.

    Args:
        before: keys and values [B, H, t, E] of the slices before it, first to last.
        end: position behind the slice's last.
        dropout: whether dropout drops.

    Attributes:
        own: keys and values of this slice.
    """

    def __init__(self, before: Sequence[KeysAndValues], end: int, dropout: bool = True) -> None:
        super().__init__()
        self.before, self.end, self.dropout = before, end, dropout
        self.own: KeysAndValues = []

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if not self.dropout and "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        dropout_p = dropout_p if self.dropout else 0.0
        if query.shape[-2] != key.shape[-2]:  # to something else than the sequence
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if not is_causal and (attn_mask is None or attn_mask.shape[-1] != self.end):
            raise PhantomError(
                "attention that is not causal (scaled_dot_product_attention without is_causal=True or a mask that the"
                " block was called with)"
            )
        self.own.append((key, value))
        if self.before:
            number = len(self.own) - 1
            keys, values = zip(*(slice_[number] for slice_ in self.before), strict=True)
            key, value = torch.cat([*keys, key], -2), torch.cat([*values, value], -2)
            if is_causal:
                attn_mask, is_causal = causal_lower_right(query.shape[-2], key.shape[-2]), False
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
