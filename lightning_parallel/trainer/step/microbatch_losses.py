"""The losses of a batch's micro-batches: what a step returned, and how much each counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def weigh(parts: Sequence[Any], sizes: Sequence[int], loss_weight: Callable[[Any], Any] | None) -> list[Any]:
    """Weight of each micro-batch, summing to 1: by its rows, or as the user says."""
    weights: list[Any] = list(sizes) if loss_weight is None else [loss_weight(part) for part in parts]
    known: list[Any] = [weight for weight in weights if not isinstance(weight, Tensor)]  # a tensor may lie on a device
    if not all(isinstance(weight, Real) and float(weight) >= 0 for weight in known) or (known and not sum(weights)):
        raise ValueError(
            f"loss_weight gave {weights} for the micro-batches of a batch. Return a number for each, 0 or more, and"
            " above 0 for one of them."
        )
    total = sum(weights)
    return [weight / total for weight in weights]


@lru_cache(maxsize=256)
def number_on(value: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number as a tensor of shape (), made once."""
    return torch.full((), value, device=device, dtype=dtype)


def loss_of(output: Any) -> Tensor:
    """The loss in what a `training_step` returned.

    Raises:
        ValueError: it is not one number.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"training_step returned {what} as its loss for a micro-batch; a pipeline needs one number. Return a scalar"
            " loss, or a dict with one under 'loss'. Skipping a step by returning None is not supported."
        )
    return loss
