"""The channels between the stages of a model's copies.

The one idea: neighbours have a boundary from the start, opened by all ranks in one order; a boundary between two other
stages is opened by the two ranks that hold them when it is known that one uses what the other makes, and all ranks of a
copy learn that together, so that the order is one here, too. Every boundary is two channels of its own, one a
direction: what waits on one holds up nothing on another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_parallel.mesh import unbound_from_device
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.stage.boundary import RecvBoundary, SendBoundary
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.token_slices.executor import TokenStageExecutor
from lightning_parallel.pipeline.transport.channel import AnyChannel, Channel, LocalChannel
from lightning_parallel.pipeline.transport.model_replica import ModelReplica

_STRAIGHT = 4  # times the number of stages: the first tag that neither neighbours nor `ModelReplica` use


class ChannelMap:
    """The boundaries of one rank's stages.

    Args:
        of: the ranks that hold the model.
        dynamic_shapes: see `SendBoundary`.
        joins: stages may wait for all micro-batches before they answer for one.
    """

    def __init__(self, of: ModelReplica, dynamic_shapes: bool, joins: bool = False) -> None:
        self._of, self._dynamic_shapes = of, dynamic_shapes
        self._alone = len(of.placement) == of.num_ranks and not joins
        self._executors: dict[tuple[int, int], StageExecutor] = {}
        self._open: set[tuple[int, int]] = set()

    def executors(self, cut: CutModel, skips: bool) -> dict[tuple[int, int], StageExecutor]:
        """The stages of this rank with their neighbours; all ranks call it."""
        of = self._of
        arrivals: dict[tuple[int, int], RecvBoundary] = {}
        departures: dict[tuple[int, int], SendBoundary] = {}
        for copy, ranks in enumerate(of.copies):
            for (replica, stage), row in sorted(of.placement.items()):
                if stage == of.num_stages - 1:
                    continue
                here, there = ranks[row], ranks[of.placement[replica, stage + 1]]
                tag = 2 * (replica * of.num_stages + stage)
                forward, backward = self._channel(here, there, tag), self._channel(there, here, tag + 1)
                ends = (forward, backward, self._dynamic_shapes, self._alone)
                if (copy, row) == (of.copy, of.row):
                    departures[replica, stage] = SendBoundary(stage, *ends)
                if (copy, there) == (of.copy, of.rank):
                    arrivals[replica, stage + 1] = RecvBoundary(stage + 1, *ends)
        name = (lambda replica: replica) if of.num_replicas > 1 else (lambda replica: None)
        make = StageExecutor if cut.slices is None else partial(TokenStageExecutor, slices=cut.slices)
        self._executors = {
            executor: make(cut, executor[1], arrivals.get(executor), departures.get(executor), name(executor[0]), skips)
            for executor, row in sorted(of.placement.items())
            if row == of.row
        }
        return self._executors

    def open_straight(self, source: int, target: int) -> None:
        """A boundary between two stages that are no neighbours, in every replica; all ranks of a copy call it alike."""
        if (source, target) in self._open:
            return
        self._open.add((source, target))
        of = self._of
        for replica in range(of.num_replicas):
            here, there = (of.ranks[of.placement[replica, stage]] for stage in (source, target))
            if of.rank not in (here, there):
                continue
            number = (replica * of.num_stages + source) * of.num_stages + target
            tag = _STRAIGHT * len(of.placement) + 2 * number
            with unbound_from_device():
                forward = self._channel(here, there, tag, use_local_synchronization=True)
                backward = self._channel(there, here, tag + 1, use_local_synchronization=True)
            if of.rank == here:
                boundaries = self._executors[replica, source].straight_out
                boundaries.append(SendBoundary(source, forward, backward, target=target))
                boundaries.sort(key=lambda boundary: boundary.target)
            if of.rank == there:
                arrivals = self._executors[replica, target].straight_in
                arrivals.append(RecvBoundary(target, forward, backward, source=source))
                arrivals.sort(key=lambda boundary: -boundary.source)

    def _channel(self, source: int, target: int, tag: int, **options: Any) -> AnyChannel:
        if source == target:
            return LocalChannel()
        of = self._of
        group = dist.new_group([source, target], backend="nccl", **options) if of.device.type == "cuda" else None
        channel = Channel(source, target, tag, of.device, None, group, of.waiting)
        channel.warm_up(of.rank)
        return channel
