"""Staleness as a torchmetrics object, for users who log and compute it as they do all else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.measure.staleness import Access


class Staleness(Metric):
    """Updates of others between a read and the update made from it: a metric that merges like any other.

    Args:
        statistic: what ``compute`` returns, "mean" or "max".
        largest: what is older counts as so old in ``histogram``; mean and max are exact.
        **kwargs: of `torchmetrics.Metric`.

    Raises:
        ValueError: another statistic, or a negative age.

    Example:
        >>> metric = Staleness()
        >>> metric.update(torch.tensor([0, 2, 1]))
        >>> metric.compute(), metric.histogram[:4].tolist()
        (tensor(1.), [1, 1, 1, 0])
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    histogram: Tensor
    total: Tensor
    most: Tensor

    def __init__(self, statistic: Literal["mean", "max"] = "mean", largest: int = 127, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if statistic not in ("mean", "max"):
            raise ValueError(f'Staleness(statistic={statistic!r}): use "mean" or "max".')
        self.statistic = statistic
        self.add_state("histogram", torch.zeros(largest + 1, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("most", torch.zeros((), dtype=torch.long), dist_reduce_fx="max")

    def update(self, ages: Tensor | int | Iterable[Access]) -> None:
        """Count ages: numbers, or accesses, of which those that wrote count."""
        values = self._numbers(ages).flatten().to(self.total)
        if values.numel() == 0:
            return
        if int(values.min()) < 0:
            raise ValueError(f"Staleness got an age of {int(values.min())}. An update is made after its read.")
        size = self.histogram.numel()
        self.histogram += torch.bincount(values.clamp(max=size - 1), minlength=size)
        self.total += values.sum()
        self.most = torch.maximum(self.most, values.max())

    @staticmethod
    def _numbers(ages: Tensor | int | Iterable[Access]) -> Tensor:
        if isinstance(ages, (Tensor, int)):
            return torch.as_tensor(ages)
        return torch.tensor([one.staleness for one in ages if one.staleness is not None], dtype=torch.long)

    def compute(self) -> Tensor:
        """The mean or the largest age, a scalar; 0 before anything was counted."""
        if self.statistic == "max":
            return self.most
        return self.total / self.histogram.sum().clamp(min=1)
