"""Causal attention of a slice: its queries see the keys and values of the slices before it.

The one idea: inside a block's call `scaled_dot_product_attention` and `nn.MultiheadAttention` are intercepted. The keys
and values of earlier slices are put in front of those of this one, and the causal mask is aligned with the last key.
Attention that is not causal is refused: what it reads comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage.intercept import Hook
from lightning_parallel.pipeline.token_slices.multi_head import MultiHead
from lightning_parallel.pipeline.weight_grad.saved import hook_on_saved_tensors

NOT_CAUSAL = (
    "attention that is not causal (scaled_dot_product_attention without is_causal=True, or attention without a mask"
    " that the block was called with)"
)
_TWO_MEANINGS = (
    "a bool mask of scaled_dot_product_attention, which says what is allowed, in a block with an nn.MultiheadAttention,"
    " where it says what is not; use masks of numbers"
)
_WITHOUT_GRADIENTS = (
    "A block attends without gradients where it was called with them (torch.no_grad, or an activation checkpoint with"
    " use_reentrant=True), and gradients of keys and values of earlier slices would be lost. Use"
    ' PipelineStrategy(recompute="block") for checkpoints, or a schedule of whole micro-batches.'
)


class SliceKeys(NamedTuple):
    """What later slices read of an attention: keys and values [B, H, t, E], and what is added to scores, [B, t]."""

    key: Tensor
    value: Tensor
    padding: Tensor | None = None


KeysAndValues = list[SliceKeys]  # of every attention in a block, in the order of their calls


class SlicedAttention(TorchFunctionMode):
    """While it is entered, a block is called with one slice.

    Args:
        before: keys and values of the slices before it, first to last.
        end: position behind the slice's last.
        length: T, of the sequence; 0: `end`.
        dropout: whether dropout drops.
        forbids: whether a bool mask that the block is called with says what is forbidden, see `forbids`.

    Attributes:
        own: keys and values of this slice.
        is_repeated: whether a checkpoint within the block will compute some of it again.
    """

    def __init__(
        self, before: Sequence[KeysAndValues], end: int, length: int = 0, dropout: bool = True, forbids: bool = False
    ) -> None:
        super().__init__()
        self.before, self.end, self.length, self.dropout, self.forbids = before, end, length or end, dropout, forbids
        self.own: KeysAndValues = []
        self._trains = self.is_repeated = False
        self._around: Any = None

    def __enter__(self) -> SlicedAttention:
        self._trains, self._around = torch.is_grad_enabled(), hook_on_saved_tensors()
        super().__enter__()
        return self

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            given = MultiHead(args, kwargs)
            return (given if self.dropout else given.without_dropout()).on_slice(self)
        return (func if self.dropout else without_dropout(func))(*args, **kwargs)

    def with_earlier(self, key: Tensor, value: Tensor, padding: Tensor | None = None) -> SliceKeys:
        """Note the keys and values of the next attention; returns them behind those of earlier slices."""
        if self._trains and not torch.is_grad_enabled():
            raise PhantomError(_WITHOUT_GRADIENTS)
        self.is_repeated |= is_checkpointed() and hook_on_saved_tensors() is not self._around
        number, own = len(self.own), SliceKeys(key, value, padding)
        self.own.append(own)
        if not self.before:
            return own
        keys, values, paddings = zip(*(slice_[number] for slice_ in self.before), own, strict=True)
        return SliceKeys(
            torch.cat(keys, -2), torch.cat(values, -2), None if padding is None else torch.cat(paddings, -1)
        )

    def causal(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Tensor:
        """Attention of a slice [B, H, t, E] to all keys up to its end."""
        if not self.before:
            return F.scaled_dot_product_attention(query, key, value, None, dropout_p, True, **options)
        mask = causal_lower_right(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)

    def refuse_mask(self, mask: Tensor | None) -> None:
        """Raise unless a mask is for the keys up to the slice's end.

        Raises:
            PhantomError: it is not.
        """
        if mask is None or mask.shape[-1] != self.end:
            raise PhantomError(NOT_CAUSAL)

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
        if not is_causal:
            self.refuse_mask(attn_mask)
        if self.forbids and attn_mask is not None and attn_mask.dtype == torch.bool:
            raise PhantomError(_TWO_MEANINGS)
        key, value, _ = self.with_earlier(key, value)
        if is_causal:
            return self.causal(query, key, value, dropout_p, **options)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)


class WholeSequence(TorchFunctionMode):
    """While it is entered, a block is called with a whole sequence, and dropout drops nothing."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return without_dropout(func)(*args, **(kwargs or {}))


def without_dropout(func: Callable) -> Callable[..., Any]:
    """An operator that drops nothing."""
    if func is F.scaled_dot_product_attention:
        return _attend_to_all
    if func is F.multi_head_attention_forward:
        return lambda *args, **kwargs: MultiHead(args, kwargs).without_dropout().whole()
    if "dropout" in getattr(func, "__name__", ""):
        return lambda input, *args, **kwargs: input
    return func


def _attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *args: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **options)


def is_checkpointed() -> bool:
    """Whether what is called now is computed again in the backward (torch.utils.checkpoint)."""
    return getattr(hook_on_saved_tensors(), "__module__", "") == "torch.utils.checkpoint"


def forbids(hook: Hook) -> bool:
    """Whether bool masks that a block is called with say what is forbidden, as those of `nn.MultiheadAttention` do."""
    return any(isinstance(part, nn.MultiheadAttention) for _, part in hook.inside)
