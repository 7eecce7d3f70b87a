"""Is the weighted mean over micro-batches the loss of the whole batch?

The one idea: a token mean with ignored labels, a sum, a contrastive loss would train silently wrong; run both ways
(``stage_check.py``), the two losses tell. So do the numbers that the step logs; what differs there is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.pipeline.parity.stage_check import Rounding, entries_near, values_near


class Number(NamedTuple):
    """A number that a step logs, float64, and how those of micro-batches with their weights are joined."""

    value: Tensor
    join: Callable[[list[Tensor], Sequence[float | Tensor]], Tensor]


Logged = Mapping[str, Number]


class StepReport(NamedTuple):
    """What a run of the step tells: its loss, what it logs, and what it returns, if that is to be compared."""

    loss: Tensor | None
    logged: Logged
    returned: Any = None


class LossCheck:
    """Compares what the last stage makes of a batch with what it makes of its micro-batches.

    Args:
        rounding: of values.
        sizes: rows of each micro-batch.
        weights: weight of each micro-batch, summing to 1.
        look: what is told of what the step returned.
    """

    def __init__(
        self,
        rounding: Rounding,
        sizes: Sequence[int],
        weights: Sequence[float | Tensor],
        look: Callable[[Any], StepReport],
    ) -> None:
        self._rounding, self._sizes, self._weights, self.look = rounding, sizes, weights, look

    def differs(self, parts: Sequence[StepReport], whole: StepReport, exactly: bool = False) -> str:
        """What is wrong with the loss, or with what is returned; ""; exactly: nothing may jump for rounding."""
        sizes, weights = self._sizes[: len(parts)], self._weights[: len(parts)]
        near = self._rounding.of_exact_losses if exactly else self._rounding.of_losses
        losses = [part.loss for part in parts if part.loss is not None]
        if whole.loss is not None and len(losses) == len(parts):
            mean = microbatch.weighted_sum(losses, weights if len(parts) > 1 else [1.0])
            if not is_close(mean, whole.loss, near):
                return (
                    f"The loss of the whole batch is {float(whole.loss):.6g}, but its {len(sizes)} micro-batches of"
                    f" {list(sizes)} rows, weighted by rows, give {float(mean):.6g}. The loss is not a mean over rows."
                    " Give PipelineStrategy(loss_weight=lambda batch: number_of_terms_in_the_mean), for instance the"
                    " number of labels that are not ignored, or use num_microbatches=1. check_loss=False skips this"
                    " comparison."
                )
        return self._returned_differs(parts, whole, exactly)

    def _returned_differs(self, parts: Sequence[StepReport], whole: StepReport, exactly: bool) -> str:
        joined = microbatch.join([part.returned for part in parts], self._sizes, self._weights)
        pairs = zip(microbatch.leaves(joined), microbatch.leaves(whole.returned), strict=False)
        tensors = [(mine, wanted) for mine, wanted in pairs if isinstance(mine, Tensor) and isinstance(wanted, Tensor)]
        if exactly:
            equal = partial(entries_near, near=self._rounding.of_entries)
        else:
            equal = partial(values_near, near=self._rounding.of_values)
        if all(mine.shape == wanted.shape and equal(mine, wanted) for mine, wanted in tensors):
            return ""
        return (
            f"What the step returns for the whole batch of {sum(self._sizes)} rows is not what it returns for its"
            f" {len(self._sizes)} micro-batches of {list(self._sizes)} rows, joined. Return one entry a row, of that"
            " row alone, or use num_microbatches=1. check_loss=False skips this comparison."
        )

    def doubts(self, parts: Sequence[StepReport], whole: StepReport) -> bool:
        """Whether a number is logged otherwise than in one process."""
        return bool(self._differing(parts, whole))

    def warn(self, parts: Sequence[StepReport], whole: StepReport, again: StepReport) -> None:
        """Warn of what is logged otherwise than in one process; not of random numbers.

        Warns:
            UserWarning: a number is not that of the whole batch.
        """
        for name in self._differing(parts, whole):
            number, once_more = whole.logged[name], again.logged.get(name)
            if once_more is None or not torch.equal(parts[0].logged[name].value, once_more.value):
                continue
            warnings.warn(
                f"The step logs {name!r}: {float(number.value):.6g} for a whole batch, and"
                f" {float(self._joined(name, parts, number)):.6g} joined over its {len(parts)} micro-batches, which is"
                " what a pipeline logs. The value is not a mean over rows. Log a torchmetrics object, self.log(name,"
                " metric), which sees all rows, or a value that is such a mean. PipelineStrategy(check_loss=False)"
                " skips this comparison.",
                stacklevel=2,
            )

    def _differing(self, parts: Sequence[StepReport], whole: StepReport) -> list[str]:
        near = self._rounding.of_losses
        return [
            name
            for name, number in whole.logged.items()
            if all(name in part.logged for part in parts)
            and not is_close(self._joined(name, parts, number), number.value, near)
        ]

    def _joined(self, name: str, parts: Sequence[StepReport], number: Number) -> Tensor:
        return number.join([part.logged[name].value for part in parts], self._weights)


def is_close(found: Tensor, wanted: Tensor, near: float) -> bool:
    """Whether two losses are equal but for rounding."""
    near_enough = (found - wanted).abs() <= near * wanted.abs().clamp_min(1e-3)
    return bool(near_enough | (found == wanted) | wanted.isnan())  # infinite numbers may be equal
