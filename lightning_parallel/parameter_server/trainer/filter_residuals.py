"""What filters left behind, in a checkpoint: each worker's residual by parameter, and what its rules draw from.

The one idea: residuals are kept in the shapes of parameters, not of ranges, so that they fit any number of servers.
Another number of workers shares them: what is still to be added to the weights stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_parallel.parameter_server.filters import Filters
from lightning_parallel.parameter_server.table import Table

KEY = "parameter_server"  # of a checkpoint


def left_behind(filters: Filters, table: Table) -> dict[str, Any]:
    """A worker's residual, tensors by group, and the state of its generator."""
    layout, state = table.layout, filters.state_dict()
    parts = {key: state["residual"].get(key, torch.zeros(layout.length(key))) for key in range(layout.num_ranges)}
    return {"residual": table.unpack(layout.join(parts).clone()), "generator": state["generator"]}


def take_up(
    filters: Filters, table: Table, saved: Sequence[Mapping[str, Any]], rank: int, workers: int, scale: str
) -> None:
    """Go on with what the workers of a checkpoint left behind.

    Args:
        filters: of this worker.
        table: of the parameters now.
        saved: of every worker then, see ``left_behind``.
        rank: of this worker.
        workers: how many there are now.
        scale: "mean" if servers divide by the number of workers, else "sum".
    """
    vectors = [table.pack(one["residual"]) for one in saved]
    same = len(saved) == workers
    vector = vectors[rank] if same else _share(vectors, workers, "mean" if scale == "mean" else "sum")
    residual = dict(enumerate(table.layout.split(vector)))
    generator = saved[rank]["generator"] if same else filters.state_dict()["generator"]
    filters.load_state_dict({"residual": residual, "generator": generator})


def _share(vectors: Sequence[Tensor], workers: int, scale: Literal["mean", "sum"]) -> Tensor:
    """Equal residuals that come to the same on the servers.

    Example:
        >>> _share([torch.tensor([1.0]), torch.tensor([3.0])], 4, "mean"), _share([torch.tensor([8.0])], 4, "sum")
        (tensor([2.]), tensor([2.]))
    """
    return torch.stack(list(vectors)).sum(0) / (len(vectors) if scale == "mean" else workers)
