"""What a step logs when it is run to be looked at: named numbers, each with how those of micro-batches are joined.

The one idea: a value that a step logs is the mean over micro-batches of what each of them logs. That is the value of
the whole batch for a mean over rows, and not for a perplexity, an F1 score or a maximum; run both ways, they tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_parallel.pipeline.parity.loss_check import Number
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.trainer.step.step_log import options_of, reduced, refuse_value


class CheckedLog:
    """Takes the place of a module's ``log`` and keeps the numbers.

    Args:
        module: whose ``self.log`` is meant.
        cut: of its model.
    """

    def __init__(self, module: LightningModule, cut: CutModel) -> None:
        self._module, self._cut = module, cut
        self._now: dict[str, Number] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside nothing is logged."""
        self._module.__dict__["log"] = self._note
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def taken(self) -> dict[str, Number]:
        """What was logged since the last call."""
        now, self._now = self._now, {}
        return now

    def _note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        run = self._cut.active
        if run is not None and not run.is_last:
            return
        value = value if run is None else run.realized(value)
        refuse_value(name, value)
        if isinstance(value, (Tensor, Real)) and not getattr(value, "is_meta", False):
            reduce_fx = options_of(self._module, name, value, args, options).get("reduce_fx", "mean")
            self._now[name] = Number(torch.as_tensor(value).detach().double().reshape(()), _joins(reduce_fx))


def _joins(reduce_fx: str | Callable[..., Any]) -> Callable[[list[Any], Sequence[Any]], Any]:
    return lambda values, weights: reduced(values, list(weights), reduce_fx)
