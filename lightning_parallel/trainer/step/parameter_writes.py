"""Writes to parameters between a step and its backward, where that backward would not see what one process's does.

One process's backward reads what its forward saved, which a hook there may or may not change. Where backwards have run
already, or weights are gathered anew, such a write has another effect; so it is noticed, if a hook that could do it is
there at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_HOOKS = ("on_before_zero_grad", "on_before_backward")


def fingerprint(module: LightningModule, held: Iterable[Tensor]) -> list[int] | None:
    """Of weights, where a hook between a step and its backward might write to them; None where there is none.

    Args:
        module: whose hooks.
        held: what this rank holds of parameters.
    """
    callbacks: list[Any] = cast(Any, module.trainer).callbacks
    asked = [(module, name) for name in (*_HOOKS, "optimizer_zero_grad")]
    asked += [(callback, name) for callback in callbacks for name in _HOOKS]
    if not any(is_overridden(name, owner) for owner, name in asked):
        return None
    real = [torch.view_as_real(values) if values.is_complex() else values for values in held]
    sums = [total for values in real for total in (values.double().sum(), values.double().abs().sum())]
    return torch.stack(sums).view(torch.int64).tolist() if sums else []


def refuse_written(before: list[int] | None, after: list[int] | None, who: str, why: str) -> None:
    """Raise if weights have changed since a step.

    Args:
        before, after: their fingerprints.
        who: refuses.
        why: the backward would not be one process's.

    Raises:
        ValueError: they have.
    """
    if before != after:
        raise ValueError(
            "A hook between a step and its backward (on_before_zero_grad, on_before_backward, optimizer_zero_grad) has"
            f" written to parameters, and under {who} {why}. Write in on_train_batch_start or on_train_batch_end, or"
            " use ZeROStrategy(stage=1)."
        )
