"""Causal attention of a slice: its queries see the keys and values of the slices before it.

The one idea: inside a block's call `scaled_dot_product_attention` and `nn.MultiheadAttention` are intercepted. The keys
and values of earlier slices are put in front of those of this one, and the causal mask is aligned with the last key.
Attention that is not causal is refused: what it reads comes later.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage.cut import Hook
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
