"""What of a block's arguments belongs to a slice of the sequence.

The one idea: a block's first tensor is [B, T, ..] and says how long the sequence is; which other arguments follow it is
read off their shapes, and `check` finds out whether that was right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.phantoms.errors import PhantomError


def length_of(block: str, arguments: Any) -> int:
    """T, the positions of a block's first tensor [B, T, ..].

    Raises:
        PhantomError: it has no such dimension.
    """
    first = next((leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() < 2:
        what = "none" if first is None else f"one of shape {tuple(first.shape)}"
        raise PhantomError(
            f"A schedule of token slices cuts the first tensor that a block is called with, [rows, positions, ..], and"
            f" `{block}` got {what}. Use a schedule of whole micro-batches, such as 1f1b."
        )
    return first.shape[1]


def is_mask(x: Tensor, length: int) -> bool:
    """Whether a tensor says of queries which keys they see.

    Bool or float, [T, T], [.., .., T, T] or [.., .., 1, T]; bool, [.., T, T].
    """
    dims = (2, 3, 4) if x.dtype == torch.bool else (2, 4)
    if x.dim() not in dims or x.shape[-1] != length or not (x.dtype == torch.bool or x.is_floating_point()):
        return False
    return x.shape[-2] == length or (x.dim() == 4 and x.shape[-2] == 1)


def cut(x: Tensor, start: int, end: int, length: int) -> Tensor:
    """The part of a block's argument for positions `start` to `end` of a sequence of `length`, a view.

    Of a mask the queries of the slice and the keys up to its end; of what has T positions in dim 1 (or 0, or the last
    but one) those of the slice; anything else as it is.

    Example:
        >>> cut(torch.zeros(2, 1, 8, 8), 2, 4, 8).shape, cut(torch.zeros(1, 8, 16), 2, 4, 8).shape
        (torch.Size([2, 1, 2, 4]), torch.Size([1, 2, 16]))
    """
    if is_mask(x, length):
        queries = x if x.shape[-2] == 1 else x[..., start:end, :]
        return queries[..., :end]
    dim = _dim_of_positions(x, length)
    return x if dim is None else x.narrow(dim, start, end - start)


def _dim_of_positions(x: Tensor, length: int) -> int | None:
    if x.dim() >= 2 and x.shape[1] == length:
        return 1
    if x.dim() in (1, 2) and x.shape[0] == length:
        return 0
    return -2 if x.dim() >= 3 and x.shape[-2] == length else None


def is_cache(leaf: Any) -> bool:
    """Whether an argument is a cache of keys and values for generation, which a block without one does not miss."""
    return any(cls.__name__ == "Cache" and cls.__module__.startswith("transformers.") for cls in type(leaf).__mro__)


def refuse_ahead(block: str, x: Tensor, length: int, forbids: bool = False) -> None:
    """Raise for a mask that looks ahead: one of numbers, added to scores, or bool.

    Args:
        block, x, length: the block's name, an argument, T.
        forbids: whether True is where attention is forbidden, and not where it is allowed.

    Raises:
        PhantomError: it lets a position see a later one.
    """
    if not is_mask(x, length) or x.shape[-2] == 1:  # the latter says which keys are padding, for all queries alike
        return
    allowed = x != forbids if x.dtype == torch.bool else x > torch.finfo(x.dtype).min / 2
    if bool(allowed.triu(1).any()):
        raise PhantomError(
            f"A mask that `{block}` is called with lets positions see later ones. Token slices are for causal models:"
            " use a schedule of whole micro-batches, such as 1f1b."
        )
