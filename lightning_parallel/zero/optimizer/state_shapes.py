"""Whether an optimizer's states of pieces can be put together: those that have an entry for each element, and counters.

An optimizer may treat each element by itself on small tensors and quantise the states of large ones in blocks, as 8-bit
Adam does: this is found when the states are there, after the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def refuse_states(optimizer: Optimizer, states: Iterable[tuple[Tensor, Mapping[str, Any]]], who: str) -> None:
    """Raise for states of pieces of parameters that are not shaped like the pieces.

    Args:
        optimizer: whose.
        states: what the optimizer updates on this rank, and its state.
        who: what divides parameters, for the message.

    Raises:
        ValueError: a field has neither an entry for each element nor one entry.

    Example:
        >>> import torch
        >>> piece = torch.zeros(4)
        >>> refuse_states(torch.optim.SGD([piece], lr=0.1), [(piece, {"step": torch.tensor(1.0)})], "ZeROStrategy")
    """
    for piece, fields in states:
        for field, value in fields.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != piece.shape:
                raise ValueError(
                    f"{who} got {type(optimizer).__name__}, whose state `{field}` has shape {tuple(value.shape)} where"
                    f" this rank updates {tuple(piece.shape)} elements of a parameter: it is not kept element by"
                    " element, and the ranks' parts make no whole. Use an optimizer that keeps its state so (SGD, Adam,"
                    " AdamW, RMSprop, ...), or HybridStrategy(zero_stage=0), which divides no states."
                )
