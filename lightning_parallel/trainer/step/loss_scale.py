"""One loss scale over all stages: float16 training (`precision="16-mixed"`) as one process does it.

The one idea: Lightning's precision plugin keeps its `GradScaler`, which scales, unscales and skips on every rank for
itself. Two things are shared: every micro-batch's backward begins with the scale, and whether a gradient anywhere was
not finite is summed over the ranks of a model copy on the device, before anyone decides. No host waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer


class LossScale:
    """The gradient scaler of a run, if it has one.

    Args:
        precision: the Trainer's precision plugin.
        all_reduce: sums a tensor in place over the ranks of a model copy.
        device: where this rank computes.
    """

    def __init__(self, precision: Precision, all_reduce: Callable[[Tensor], None], device: torch.device) -> None:
        scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._all_reduce, self._device = all_reduce, device
        if self._scaler is not None:
            self._unscale = self._scaler._unscale_grads_
            vars(self._scaler)["_unscale_grads_"] = self._unscale_and_agree

    def scaled(self, seed: Tensor) -> Tensor:
        """What a backward begins with, times the scale."""
        return seed if self._scaler is None else self._scaler.scale(seed)

    def release(self) -> None:
        """Leave the scaler as it was."""
        if self._scaler is not None:
            del self._scaler._unscale_grads_
            self._scaler = None

    def _unscale_and_agree(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = self._unscale(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = sum((count.to(self._device) for count in found.values()), torch.zeros(1, device=self._device))
        self._all_reduce(anywhere)
        return {self._device: anywhere.clamp_(max=1.0)}  # fused optimizers look for exactly 1
