"""How long every unit of a model takes, the same numbers on all ranks: what partition="time" cuts by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_parallel.pipeline.planning.timing import Context, unit_costs

if TYPE_CHECKING:
    from lightning_parallel.pipeline.runtime.assembly import Pipeline


def agreed_seconds(pipeline: Pipeline, names: Sequence[str], context: Context) -> dict[str, float]:
    """Seconds of F and B of the named units, as the loss stage's rank of the first copy measures them."""
    seconds = torch.zeros(len(names), dtype=torch.float64)
    if pipeline.at_loss and pipeline.copy == 0:
        costs = unit_costs(pipeline.model, names, pipeline.device, 'partition="time"', context)
        seconds = torch.tensor([costs[name].forward + costs[name].backward for name in names], dtype=torch.float64)
    if pipeline.at_loss:
        pipeline.data.equalize([seconds])
        pipeline.tensor.equalize([seconds])
    pipeline.broadcast(seconds)
    return dict(zip(names, seconds.tolist(), strict=True))
