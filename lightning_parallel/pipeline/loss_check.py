"""Is the weighted mean over micro-batches the loss of the whole batch? Asked once, on the loss stage.

The one idea: the loss stage still has what the earlier stages sent for each micro-batch. Joined, they are what they
would have sent for the whole batch, so the step can be evaluated both ways (no gradients, modules in evaluation mode)
and the two losses compared. A token mean with ignored labels, a sum, a contrastive loss differ, and would train
silently wrong. So are the numbers that the step logs; what differs there is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_parallel.pipeline import microbatch
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.goods import Place
from lightning_parallel.pipeline.snapshot import untouched
from lightning_parallel.pipeline.stage import StageRun, UnitOutputs
from lightning_parallel.pipeline.values import TensorMeta

Received = tuple[Mapping[Place, Tensor], UnitOutputs]  # values by position, and what the units before return


class Number(NamedTuple):
    """A number that a step logs, float64, and how those of micro-batches with their weights are joined."""

    value: Tensor
    join: Callable[[list[Tensor], Sequence[float | Tensor]], Tensor]


Logged = Mapping[str, Number]


def check_loss(
    cut: Cut,
    steps: Sequence[Callable[[], Any]],
    whole: Callable[[], Any],
    received: Sequence[Received],
    sizes: Sequence[int],
    weights: Sequence[float | Tensor],
    loss_of: Callable[[Any], Tensor],
    logged: Callable[[], Logged] = dict,
) -> None:
    """Compare the weighted micro-batch losses with the loss of the joined batch, and what is logged likewise.

    Args:
        cut: the model.
        steps: the user's step on each micro-batch.
        whole: the user's step on the whole batch.
        received: what this stage received for each micro-batch.
        sizes: rows of each micro-batch.
        weights: weight of each micro-batch, summing to 1.
        loss_of: the loss in what a step returns.
        logged: what was logged since the last call.

    Raises:
        ValueError: the losses differ beyond rounding.

    Warns:
        UserWarning: what is logged differs.
    """
    stage = cut.layout.num_stages - 1

    def look(step: Callable[[], Any], inputs: Received, key: int) -> tuple[Tensor, Logged]:
        run = StageRun(cut, stage, 0, key, {i: t.clone() for i, t in inputs[0].items()}, inputs[1], learn=False)
        cut.streams.begin(0, key)
        return loss_of(run.forward(step)).detach().double(), logged()

    with torch.no_grad(), untouched(cut.model):
        cut.model.eval()
        try:
            parts = [look(step, inputs, 1) for step, inputs in zip(steps, received, strict=True)]
            again = look(steps[0], received[0], 2)
            if not torch.equal(parts[0][0], again[0]):
                _could_not("the step draws random numbers outside its modules")
                return
            joined = look(whole, _join(received, sizes), 1)
        except Exception as error:
            # The joined batch may be what the user's code cannot do: then there is nothing to compare.
            _could_not(f"the step fails on the joined batch: {type(error).__name__}: {error}")
            return
    near = _tolerance(cut, received)
    mean = microbatch.weighted_sum([loss for loss, _ in parts], weights)
    if not _is_close(mean, joined[0], near):
        raise ValueError(
            f"The loss of the whole batch is {float(joined[0]):.6g}, but its {len(sizes)} micro-batches of"
            f" {list(sizes)} rows, weighted by rows, give {float(mean):.6g}. The loss is not a mean over rows. Give"
            " PipelineStrategy(loss_weight=lambda batch: number_of_terms_in_the_mean), for instance the number of"
            " labels that are not ignored, or use num_microbatches=1. check_loss=False skips this comparison."
        )
    _compare_logged([log for _, log in parts], again[1], joined[1], weights, near)


def _compare_logged(
    parts: Sequence[Logged], again: Logged, whole: Logged, weights: Sequence[float | Tensor], near: float
) -> None:
    """Warn of what is logged otherwise than in one process; not of random numbers."""
    for name, number in whole.items():
        if any(name not in part for part in parts) or not torch.equal(parts[0][name].value, again[name].value):
            continue
        joined = number.join([part[name].value for part in parts], weights)
        if not _is_close(joined, number.value, near):
            warnings.warn(
                f"The step logs {name!r}: {float(number.value):.6g} for a whole batch, and {float(joined):.6g} joined"
                f" over its {len(parts)} micro-batches, which is what a pipeline logs. The value is not a mean over"
                " rows. Log a torchmetrics object, self.log(name, metric), which sees all rows, or a value that is"
                " such a mean. PipelineStrategy(check_loss=False) skips this comparison.",
                stacklevel=2,
            )


def _is_close(found: Tensor, wanted: Tensor, near: float) -> bool:
    near_enough = (found - wanted).abs() <= near * wanted.abs().clamp_min(1e-3)
    return bool(near_enough | (found == wanted) | wanted.isnan())  # infinite numbers may be equal


def _tolerance(cut: Cut, received: Sequence[Received]) -> float:
    """Relative rounding of a loss, by the coarsest dtype in sight."""
    dtypes = {tensor.dtype for inputs, _ in received for tensor in inputs.values()}
    dtypes |= {meta.dtype for _, units in received for meta in tree_flatten(units)[0] if isinstance(meta, TensorMeta)}
    dtypes |= {parameter.dtype for parameter in cut.model.parameters()}
    if dtypes & {torch.bfloat16, torch.float16}:
        return 2e-2
    return 2e-5 if cut.device.type == "cpu" else 1e-3


def _join(received: Sequence[Received], sizes: Sequence[int]) -> Received:
    """The values and unit outputs of the whole batch, for values whose first dimension is rows."""
    rows, first = sum(sizes), received[0]

    def whole(meta: Any) -> Any:
        if isinstance(meta, TensorMeta) and meta.shape and meta.shape[0] == sizes[0]:
            return replace(meta, shape=(rows, *meta.shape[1:]))
        return meta

    values = {}
    for position, tensor in first[0].items():
        if any(position not in inputs for inputs, _ in received):
            continue  # came with the first micro-batch of a signature only: this stage needs no such value
        column = [inputs[position] for inputs, _ in received]
        by_rows = tensor.dim() > 0 and all(t.shape[0] == size for t, size in zip(column, sizes, strict=True))
        values[position] = torch.cat(column) if by_rows else tensor
    return values, {name: tree_map(whole, output) for name, output in first[1].items()}


def _could_not(reason: str) -> None:
    warnings.warn(
        f"Could not compare the micro-batches' loss with the whole batch's ({reason}). Micro-batches are weighted by"
        " rows: make sure that the loss is a mean over rows, or give PipelineStrategy(loss_weight=...).",
        stacklevel=2,
    )
