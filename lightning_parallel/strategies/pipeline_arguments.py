"""What `PipelineStrategy`'s arguments have to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from lightning_parallel.pipeline.cut import Recompute
from lightning_parallel.pipeline.partition import PARTITIONS
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies.arguments import all_are, are_counts, is_count, is_positive, refuse_arguments

if TYPE_CHECKING:
    from lightning_parallel.strategies.pipeline import PipelineStrategy

LossWeight = Callable[[Any], "float | Tensor"]
_PARTITION_WORDS = '"parameters", "flops", "time", "count" or a list with the number of blocks of each stage'


def refuse_pipeline_arguments(strategy: PipelineStrategy, schedule: str | Path | Schedule) -> None:
    """Raise for the first of a strategy's attributes that is not right, or for what was given as its schedule."""
    refuse_arguments(
        strategy,
        schedule=(schedule, isinstance(schedule, (str, Path, Schedule)), "a name, a path or a Schedule"),
        num_microbatches=(
            strategy.num_microbatches,
            strategy.num_microbatches is None or is_count(strategy.num_microbatches, 1),
            "at least 1",
        ),
        blocks=(
            strategy.blocks,
            isinstance(strategy.blocks, str) or all_are(strategy.blocks, str),
            '"auto", a name or names',
        ),
        partition=(
            strategy.partition,
            strategy.partition in PARTITIONS or all_are(strategy.partition, int),
            _PARTITION_WORDS,
        ),
        stages=(
            strategy.stages,
            strategy.stages is None
            or (isinstance(strategy.stages, Mapping) and all(isinstance(n, int) for n in strategy.stages.values())),
            "a mapping of names to numbers of stages",
        ),
        loss_weight=(
            strategy.loss_weight,
            strategy.loss_weight is None or callable(strategy.loss_weight),
            "a function of a micro-batch",
        ),
        memory_limit=(
            strategy.memory_limit,
            strategy.memory_limit is None or (is_positive(strategy.memory_limit) and schedule == "auto"),
            'a number of bytes above 0, with schedule="auto"',
        ),
        check_loss=(strategy.check_loss, isinstance(strategy.check_loss, bool), "True or False"),
        dynamic_shapes=(strategy.dynamic_shapes, isinstance(strategy.dynamic_shapes, bool), "True or False"),
        skip_connections=(
            strategy.skip_connections,
            isinstance(strategy.skip_connections, bool) and not (strategy.skip_connections and strategy.dynamic_shapes),
            "True or False, and False with dynamic_shapes=True",
        ),
        receive_ahead=(
            strategy.receive_ahead,
            strategy.receive_ahead is None or is_count(strategy.receive_ahead, 0),
            "a number of actions, 0 or more",
        ),
        recompute=(strategy.recompute, strategy.recompute in get_args(Recompute), '"none", "block" or "stage"'),
        cuda_graphs=(
            strategy.cuda_graphs,
            isinstance(strategy.cuda_graphs, bool)
            and not (strategy.cuda_graphs and (strategy.dynamic_shapes or strategy.recompute != "none")),
            'True or False, and False with dynamic_shapes=True or recompute="block" or "stage"',
        ),
        slices=(
            strategy.slices,
            strategy.slices is None
            or is_count(strategy.slices, 1)
            or (isinstance(strategy.slices, Sequence) and are_counts(strategy.slices, 1)),
            "a number of slices, or a list with the tokens of each, 1 or more",
        ),
        data_parallel_size=(
            strategy.data_parallel_size,
            is_count(strategy.data_parallel_size, 1),
            "a number of copies, 1 or more",
        ),
    )
