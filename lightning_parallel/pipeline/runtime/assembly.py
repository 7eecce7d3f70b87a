"""A pipeline put together on one rank: the cut model, its parameters, its channels, its engine.

The one idea: this is the only place that knows both which rank holds which stage and how ranks talk; the parts below
know one of the two, the strategy above asks in terms of stages. No Lightning here: the machinery can be run without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_parallel.parallel.uncut import Uncut
from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.pipeline.gradients.data_axis import DataAxis
from lightning_parallel.pipeline.gradients.fresh_gradients import FreshGradients
from lightning_parallel.pipeline.gradients.gradient_sums import GradientSums
from lightning_parallel.pipeline.graphs import SharedGraphs
from lightning_parallel.pipeline.parameters.own_part import OwnPart
from lightning_parallel.pipeline.parameters.replica_check import compare
from lightning_parallel.pipeline.parameters.table import ParameterTable
from lightning_parallel.pipeline.partition.blocks import unit_names
from lightning_parallel.pipeline.partition.layout import Partition, lay_out
from lightning_parallel.pipeline.planning.timing import Context, unit_costs
from lightning_parallel.pipeline.runtime.clock import make_clock
from lightning_parallel.pipeline.runtime.engine import Engine
from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.stage.cut import CutModel, Recompute
from lightning_parallel.pipeline.stage.rounds import Rounds
from lightning_parallel.pipeline.token_slices.executor import TokenStageExecutor
from lightning_parallel.pipeline.token_slices.lengths import Slices
from lightning_parallel.pipeline.transport.axis_line import AxisLine
from lightning_parallel.pipeline.transport.channel import Waiting, nobody_waits
from lightning_parallel.pipeline.transport.channel_map import ChannelMap


class Pipeline(OwnPart):
    """One rank's part of a model that runs as a pipeline.

    Args:
        model: the whole model, real or built under `without_memory`; this rank's part of it stays, the rest is freed.
        copies, tensor_size, mates_group: see `Copy`.
        placement: for every stage (of every replica) the row that holds it; default row s for stage s.
        device: where this rank computes.
        blocks, partition, stages: see `lay_out`.
        dynamic_shapes: see `SendBoundary`.
        joins: see `ChannelMap`.
        skip_connections: stages may use what any earlier stage's units return.
        receive_ahead: see `Engine`; default 1 on CPU, 0 on a GPU, where a receive that waits is a kernel that keeps
            multiprocessors from the action before it.
        recompute, keep_inputs: see `CutModel`.
        cuda_graphs: launch blocks as CUDA graphs, see `graphs`.
        slices: into what sequences are cut, for schedules of token slices.
        early_sums: whether sums of gradients over copies begin while backwards run.
        divide: divides parameters over the copies as soon as they are made, given this and them; None: they stay whole.
        seconds, context: of every unit, for partition="time"; None: they are measured, with forwards in this context.
        group: gives the group of this copy's ranks as it is at the moment; None: the default group.
        tensor: how parameters are cut over the tensor axis, once all ranks hold equal ones.
        data_group, tensor_group: the ranks of this row in the copies along each axis; None: the default group's.
        fail: turns an exception inside an action into the one to raise.
        waiting: a context entered while this process is blocked in a receive.

    Raises:
        ValueError: the model cannot be cut so, or was cut otherwise before.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: Sequence[Sequence[int]],
        device: torch.device,
        placement: Mapping[tuple[int, int], int] | None = None,
        *,
        group: Callable[[], Any] = lambda: None,
        data_group: Any = None,
        tensor_size: int = 1,
        tensor_group: Any = None,
        tensor: Uncut | None = None,
        mates_group: Callable[[], Any] | None = None,
        blocks: str | Sequence[str] = "auto",
        partition: Partition = "parameters",
        stages: Mapping[str, int] | None = None,
        seconds: Mapping[str, float] | None = None,
        dynamic_shapes: bool = False,
        joins: bool = False,
        skip_connections: bool = False,
        receive_ahead: int | None = None,
        recompute: Recompute = "none",
        keep_inputs: Callable[[], AbstractContextManager[Any]] = nullcontext,
        cuda_graphs: bool = False,
        slices: Slices | None = None,
        early_sums: bool = True,
        divide: Callable[[Pipeline, Sequence[nn.Parameter]], None] | None = None,
        context: Context = nullcontext,
        fail: Callable[[Exception, Action], BaseException] = lambda error, action: error,
        waiting: Waiting = nobody_waits,
    ) -> None:
        placement = placement or {(0, row): row for row in range(len(copies[0]))}
        super().__init__(copies, placement, device, group, waiting, tensor_size, mates_group)
        self._divide = None if divide is None else partial(divide, self)
        self.model, self._over_tensor = model, tensor or Uncut()
        data_place, tensor_place = divmod(self.copy, tensor_size)
        first = data_place * tensor_size
        self.data = DataAxis([r[self.row] for r in self.copies[tensor_place::tensor_size]], data_group, waiting)
        self.tensor = AxisLine([r[self.row] for r in self.copies[first : first + tensor_size]], tensor_group, waiting)
        if partition == "time" and not set(names := unit_names(model, self.num_stages, blocks)) <= set(seconds or ()):
            seconds = agreed_seconds(self, names, context)
        layout = lay_out(model, self.num_stages, blocks, partition, stages, seconds, self.num_ranks)
        self.table = ParameterTable(model, layout, self._holders(), self.row)
        self.streams = self._take_parameters()
        graphs = SharedGraphs(device) if cuda_graphs else None
        self._prepare_gradients(graphs, early_sums)
        self.cut = CutModel(
            model, layout, device, self.streams, recompute, graphs, keep_inputs, skip_connections, slices
        )
        self.clock = make_clock(device)
        links = ChannelMap(self, dynamic_shapes, joins)
        executors = links.executors(self.cut, skip_connections)
        if receive_ahead is None:
            receive_ahead = 1 if device.type == "cpu" else 0
        self.engine = Engine(self.row, executors, self.clock, fail, receive_ahead)
        self.rounds = Rounds(
            self.cut, executors, self.all_gather, fail, links.open_straight if skip_connections else None
        )

    def _prepare_gradients(self, graphs: SharedGraphs | None, early_sums: bool) -> None:
        """Where gradients are kept, and what sums them over replicas or over copies while backwards run."""
        own = [parameter for _, parameter in self.own]
        self.gradients = FreshGradients(own) if graphs is None else FreshGradients(own, graphs.holds)
        holders = self._groups if self.num_replicas > 1 else {}
        copies = self.open_sum_groups() if self.data.size > 1 and early_sums else {}
        self.sums: GradientSums | None = None
        if holders or copies:
            self.sums = GradientSums(
                self.table, self.gradients, holders, copies, self.comes_unseen, self._is_summed_over_tensor
            )

    def comes_unseen(self, parameter: nn.Parameter) -> bool:
        """Whether some of a parameter's gradient is made where no hook is called, or after an action."""
        graphs = self.cut.graphs
        return self._is_summed_over_tensor(parameter) or (graphs is not None and graphs.adds_to(parameter))

    def _is_summed_over_tensor(self, parameter: nn.Parameter) -> bool:
        return parameter in self._over_tensor.summed

    def close(self) -> None:
        """Give the modules their classes back."""
        self.cut.release()

    # -- one step ------------------------------------------------------------------------------------------------------

    def signatures(self, kind: str, parts: Sequence[Any]) -> list[Hashable]:
        """What decides the shapes in a step, for each micro-batch; equal on all ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            trainable = tuple(parameter.requires_grad for parameter in self._all)
        mode = (kind, self.model.training, torch.is_grad_enabled(), trainable)
        return [(*mode, microbatch.signature(part)) for part in parts]

    def cuts_sequences(self, signatures: Sequence[Hashable]) -> bool:
        """Whether micro-batches of these signatures run in token slices: each ran as a whole once, and others wait."""
        executors = [
            executor for executor in self.engine.executors.values() if isinstance(executor, TokenStageExecutor)
        ]
        return (
            bool(executors)
            and self.num_stages > 1
            and all(executor.knows(signature) for executor in executors for signature in signatures)
        )

    @property
    def held_stages(self) -> list[int]:
        """The stages of this rank."""
        return sorted({stage for _, stage in self.engine.executors})

    def compare_replicas(self, when: str) -> None:
        """Are parameters and buffers that several ranks hold the same bits on all of them? `when`: for the message.

        Raises:
            ValueError: they are not.
        """
        compare(self.table, self.ranks, self.all_gather, when)


def rows_by_rank(schedule: Schedule) -> list[int]:
    """The row of each rank of a model copy: the row of the last stage comes first, its neighbours before it follow.

    Example:
        >>> rows_by_rank(Schedule.from_text("0F0 0B0 / 1F0 1B0 / 2F0 2B0"))
        [2, 1, 0]
    """
    last, count = schedule.placement[0, schedule.num_stages - 1], schedule.num_ranks
    return list(range(count)) if last == 0 else [(last - rank) % count for rank in range(count)]


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
