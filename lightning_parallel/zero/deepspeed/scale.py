"""The loss scale of float16 training where DeepSpeed holds gradients: one answer on all ranks whether all are finite.

The one idea: a `GradScaler` reads the gradients of an optimizer, which has none here. In their place it is told whether
any rank's gradient is not finite, and what it would have multiplied them by is left to the step (``Update``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class HeldScale:
    """Stands in place of a scaler's reading of gradients.

    Args:
        scaler: Lightning's.
        gradients: this rank's, as they are held now.
        tell: takes the factor, 0-D, by which gradients are multiplied in the step.
        device: where this rank computes.
    """

    def __init__(
        self, scaler: Any, gradients: Callable[[], Iterable[Tensor]], tell: Callable[[Tensor], None],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._scaler, self._gradients, self._tell, self._device = scaler, gradients, tell, device
        vars(scaler)["_unscale_grads_"] = self._unscale

    def release(self) -> None:
        """Leave the scaler as it was."""
        vars(self._scaler).pop("_unscale_grads_", None)

    def _unscale(self, optimizer: Optimizer, inv_scale: Tensor, *_: Any) -> dict[torch.device, Tensor]:
        self._tell(inv_scale)
        unlike = [~gradient.isfinite().all() for gradient in self._gradients()]
        found = torch.zeros(1, device=self._device)
        if unlike:
            found += torch.stack([flag.to(self._device) for flag in unlike]).any()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {self._device: found}


def held_gradients(inner: Any, stage: int, offload: bool) -> list[Tensor]:
    """What DeepSpeed's optimizer holds between backward and step, on this rank; what is not reduced yet too."""
    if stage == 3:
        return [inner.grad_partitions_flat_buffer]
    if stage == 2 and offload:
        held = inner.accumulated_grads_in_cpu
        return [held[number] for number in inner._offload_accumulated_param_ids]
    if stage == 2:
        return [g for group in inner.all_grad_tensors.values() for g in group or ()]
    parameters = [p for group in inner.bit16_groups for p in group]
    return [g for p in parameters for g in (p.grad, getattr(p, "grad_accum", None)) if g is not None]
