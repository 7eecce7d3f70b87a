"""A pipeline strategy puts its pipeline together: which ranks hold which stages, and by which arguments.

The one idea: a strategy with more axes or divided states overrides what differs and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

from torch import nn

from lightning_parallel.mesh import grid
from lightning_parallel.pipeline.partition.layout import Partition
from lightning_parallel.pipeline.runtime.assembly import Pipeline, rows_by_rank
from lightning_parallel.pipeline.schedule import Action
from lightning_parallel.pipeline.stage.cut import Recompute
from lightning_parallel.strategies.pipeline_steps import PipelineSteps


class PipelineBuilding(PipelineSteps):
    """The part of a pipeline strategy that builds the pipeline; the arguments are `PipelineStrategy`'s."""

    partition: Partition
    stages: Mapping[str, int] | None
    dynamic_shapes: bool
    batch_norm: Literal["microbatch", "batch"]
    skip_connections: bool
    receive_ahead: int | None
    recompute: Recompute

    def keep_inputs(self) -> AbstractContextManager[Any]:
        """A context in which inputs of blocks are saved that `recompute="block"` computes again."""
        return nullcontext()

    def divides_early(self) -> Callable[[Pipeline, Sequence[nn.Parameter]], None] | None:
        """What divides parameters over the copies as soon as they are made, if anything does."""
        return None

    def _assemble(self) -> Pipeline:
        assert self.lightning_module is not None
        schedule = self._full_schedule()
        order = rows_by_rank(schedule)
        lines = grid(self.axes(), ("data", "tensor", "pipeline")).reshape(-1, self.num_ranks)
        ranks = lines[:, [order.index(row) for row in range(len(order))]]
        return Pipeline(
            self.lightning_module,
            ranks.tolist(),
            self.root_device,
            schedule.placement,
            group=partial(self.group, "pipeline"),
            data_group=self.group("data"),
            tensor_size=self.axis_size("tensor"),
            tensor_group=self.group("tensor"),
            tensor=self.tensor,
            mates_group=partial(self.group, "pipeline", "tensor"),
            blocks=self.blocks,
            partition=self.partition,
            stages=self.stages,
            seconds=self._seconds,
            dynamic_shapes=self.dynamic_shapes,
            joins=self.batch_norm == "batch",
            skip_connections=self.skip_connections,
            receive_ahead=self.receive_ahead,
            recompute=self.recompute,
            keep_inputs=self.keep_inputs,
            cuda_graphs=self.cuda_graphs,
            slices=self._token_slices(schedule) if schedule.num_slices else None,
            early_sums=self.early_sums,
            divide=self.divides_early(),
            context=self.precision_plugin.train_step_context,
            fail=self._stage_error,
            waiting=self.blocked,
        )

    def _stage_error(self, error: Exception, action: Action) -> BaseException:
        assert self.watch is not None
        work = "forward" if action.kind == "F" else "backward"
        if len(self.stages_held) > 1:
            self.watch.stage = action.stage
        replica = f" on replica {action.replica}" if self.pipeline.num_replicas > 1 else ""
        return self.watch.report(error, f"the {work} of micro-batch {action.microbatch}{replica}")
