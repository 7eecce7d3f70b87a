"""What `PipelineStrategy`'s arguments have to be.

The one idea: a table of rules, one an argument, each in sight of all arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from torch import Tensor

from lightning_parallel.pipeline.batch.fields import KINDS
from lightning_parallel.pipeline.partition.layout import PARTITIONS
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.stage.cut import Recompute
from lightning_parallel.strategies.arguments import all_are, are_counts, is_count, is_positive, refuse_arguments

LossWeight = Callable[[Any], "float | Tensor"]


def refuse_pipeline_arguments(strategy: object, schedule: str | Path | Schedule, batch_fields: Any) -> None:
    """Raise for the first of a strategy's attributes that is not right, or for what was given as its schedule or its
    `batch_fields`."""
    given = SimpleNamespace(**{**vars(strategy), "schedule": schedule, "batch_fields": batch_fields})
    refuse_arguments(
        strategy, **{name: (getattr(given, name), right(given), needed) for name, (right, needed) in _RULES.items()}
    )


def _are_stages(stages: Any) -> bool:
    return isinstance(stages, Mapping) and all(isinstance(stage, int) for stage in stages.values())


def _are_fields(fields: Any) -> bool:
    return isinstance(fields, Mapping) and all(
        isinstance(name, (str, int)) and kind in KINDS for name, kind in fields.items()
    )


def _are_slices(slices: Any) -> bool:
    return is_count(slices, 1) or (isinstance(slices, Sequence) and are_counts(slices, 1))


def _may_skip(given: Any) -> bool:
    skips = given.skip_connections
    return isinstance(skips, bool) and not (skips and given.dynamic_shapes)


def _may_capture(given: Any) -> bool:
    graphs, asks = given.cuda_graphs, given.recompute != "none" or given.batch_norm == "batch"
    return isinstance(graphs, bool) and not (graphs and (given.dynamic_shapes or asks))


# {argument: (whether it is right, what it has to be)}
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (lambda x: isinstance(x.schedule, (str, Path, Schedule)), "a name, a path or a Schedule"),
    "num_microbatches": (lambda x: x.num_microbatches is None or is_count(x.num_microbatches, 1), "at least 1"),
    "blocks": (lambda x: isinstance(x.blocks, str) or all_are(x.blocks, str), '"auto", a name or names'),
    "partition": (
        lambda x: x.partition in PARTITIONS or all_are(x.partition, int),
        '"parameters", "flops", "time", "count" or a list with the number of blocks of each stage',
    ),
    "stages": (lambda x: x.stages is None or _are_stages(x.stages), "a mapping of names to numbers of stages"),
    "loss_weight": (lambda x: x.loss_weight is None or callable(x.loss_weight), "a function of a micro-batch"),
    "memory_limit": (
        lambda x: x.memory_limit is None or (is_positive(x.memory_limit) and x.schedule == "auto"),
        'a number of bytes above 0, with schedule="auto"',
    ),
    "check_loss": (lambda x: isinstance(x.check_loss, bool), "True or False"),
    "batch_fields": (
        lambda x: x.batch_fields is None or _are_fields(x.batch_fields),
        'a mapping of names of fields to "rows" or "whole"',
    ),
    "dynamic_shapes": (lambda x: isinstance(x.dynamic_shapes, bool), "True or False"),
    "skip_connections": (_may_skip, "True or False, and False with dynamic_shapes=True"),
    "receive_ahead": (
        lambda x: x.receive_ahead is None or is_count(x.receive_ahead, 0),
        "a number of actions, 0 or more",
    ),
    "recompute": (lambda x: x.recompute in get_args(Recompute), '"none", "block" or "stage"'),
    "batch_norm": (lambda x: x.batch_norm in ("microbatch", "batch"), '"microbatch" or "batch"'),
    "cuda_graphs": (
        _may_capture,
        'True or False, and False with dynamic_shapes=True, recompute="block" or "stage", or batch_norm="batch"',
    ),
    "slices": (
        lambda x: x.slices is None or _are_slices(x.slices),
        "a number of slices, or a list with the tokens of each, 1 or more",
    ),
    "data_parallel_size": (lambda x: is_count(x.data_parallel_size, 1), "a number of copies, 1 or more"),
}
