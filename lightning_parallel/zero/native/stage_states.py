"""The states of a pipeline's stages on one rank, divided among the ranks that hold the same stages for other rows.

The one idea: to those ranks the stages are a model, and they divide it as ranks divide a whole one, on the same
buckets. What is special to a pipeline: all gradients are there when they are reduced, once a step; parameters of
different stages, or that other ranks of the pipeline hold too, lie in buckets of their own, which all who hold them cut
alike, so that what is equal stays equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.pipeline.gradients.data_axis import DataAxis
from lightning_parallel.pipeline.gradients.early_sums import Round
from lightning_parallel.pipeline.parameters.table import ParameterEntry, ParameterTable
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.transport.channel import Waiting, nobody_waits
from lightning_parallel.zero.closed_parameters import Closed, lend_in_forward, lose
from lightning_parallel.zero.expected_bytes import ModelStates
from lightning_parallel.zero.gather.parameter_gather import ParameterGather
from lightning_parallel.zero.native.bucket import Bucket
from lightning_parallel.zero.native.copies import divide_copy, make_copy_whole
from lightning_parallel.zero.native.early_reduction import EarlyReduction
from lightning_parallel.zero.native.engine import states_of_partition
from lightning_parallel.zero.native.gathered_bucket import GatheredBucket
from lightning_parallel.zero.native.partition import Options, Partition
from lightning_parallel.zero.optimizer.state import Piece, join_pieces, load_masters, load_optimizer_state, own_pieces
from lightning_parallel.zero.ranks import Ranks

NARROW = (torch.float16, torch.bfloat16)
States = dict[nn.Parameter, dict[str, Any]]
Bring = Callable[[Mapping[Any, Mapping[str, Any]], Sequence[Any]], Mapping[Any, Mapping[str, Any]]]


class StageStates:
    """What this rank holds of its stages' states.

    Args:
        table: the pipeline's parameters.
        optimizers: with this rank's parameters in their groups.
        data: the ranks among which states are divided.
        options: how.
        waiting: a context entered while this process is blocked.
        by_block: whether blocks are gathered apart.
        reductions: a group of the ranks of `data`, over which gradients are reduced.
        comes_unseen, meet: see `EarlyReduction` and `ParameterGather`.
    """

    def __init__(
        self,
        table: ParameterTable, optimizers: Sequence[Optimizer], data: DataAxis, options: Options,
        waiting: Waiting = nobody_waits, by_block: bool = False,
        reductions: Any = None,
        comes_unseen: Callable[[nn.Parameter], bool] = lambda parameter: False,
        meet: Callable[[str, int, int], None] = lambda name, place, action: None,
    ) -> None:  # fmt: skip
        self.table, self.data, self.stage = table, data, options.stage
        self._copies: list[nn.Module] = []
        self._released = False
        self._entries: dict[nn.Parameter, ParameterEntry] = {parameter: entry for entry, parameter in table.own()}
        self._blocks = table.blocks() if by_block else {}
        ranks = Ranks(data.place, data.size, data.group, reductions=reductions)
        self.partition = partition = Partition(
            table.model, optimizers, ranks, options, control=data.group, source=data.ranks[0], waiting=waiting,
            agree=data.agree, group=data.group, apart=self._apart, who="HybridStrategy",
        )  # fmt: skip
        self.windows = ParameterGather(
            partition.buckets, self._stages_of, partition.traffic, waiting, self._block_of, meet
        )
        self.early = EarlyReduction(
            partition.reducer, self._entry_of, table.row, lambda: not self.windows.is_walking, comes_unseen
        )

    def _apart(self, parameter: nn.Parameter) -> Any:
        """Blocks come in the order in which a backward is done with them, and behind them what lies in none."""
        entry = self._entries[parameter]
        return entry.stages, entry.rows, -self._blocks.get(entry.name, -1)

    def _block_of(self, bucket: Bucket) -> int | None:
        return self._blocks.get(self._entry_of(bucket).name)

    def _entry_of(self, bucket: Bucket) -> ParameterEntry:
        return self._entries[bucket.parameters[0]]

    def _stages_of(self, bucket: Bucket) -> tuple[int, ...]:
        return self._entry_of(bucket).stages

    # -- steps ---------------------------------------------------------------------------------------------------------

    def divide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide parameters, where no optimizer says which, that may have been made since; all copies call it."""
        self._entries = {parameter: entry for entry, parameter in self.table.own()}
        self.partition.fill(list(parameters)[::-1])

    def reduce(self, accumulating: bool) -> None:
        """A step's gradients are in `grad`: average them over the copies, and keep this rank's part.

        Stage 1 does so once for several batches that accumulate, stages 2 and 3, which hold no more than a part between
        batches, after each.
        """
        if not accumulating or self.stage > 1:
            self.partition.reducer.reduce_made(self.early.order)

    def reduce_early(self, schedule: Schedule) -> tuple[Round, Callable[[int], None]]:
        """A step begins whose gradients leave as soon as they are final; see `EarlyReduction.begin`."""
        going, after = self.early.begin(schedule)
        parameters: dict[int, list[nn.Parameter]] = {}
        for parameter, entry in self._entries.items():
            if entry.name in self._blocks:
                parameters.setdefault(self._blocks[entry.name], []).append(parameter)

        def passed(block: int) -> None:
            going.come_past(parameters[block])
            self.partition.reducer.settle()

        self.windows.passed = passed
        return going, after

    def begin(self, batches: int, whole: bool = False) -> bool:
        """Before a step of stage 3, whose gathers all copies have to share: they are there, with as many micro-batches.

        Args:
            batches: how many.
            whole: whether this copy needs all parameters for the length of the step.

        Returns:
            Whether any copy does.

        Raises:
            ValueError: others have come to a pause, or have another number.
        """
        self.partition.reducer.meet()
        self.windows.begin_step()
        counts = torch.tensor([batches, -batches, whole])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.data.group)
        most, least = int(counts[0]), -int(counts[1])
        if most != least:
            raise ValueError(
                f"Copies of the model got batches of {least} to {most} micro-batches in one step, and gather parameters"
                ' once for each. Give all of them as many rows (drop_last=True), or use gather="step".'
            )
        return bool(counts[2])

    def agree(self, said: list[bool]) -> list[bool]:
        """For each answer, whether any copy gave it; collective."""
        votes = torch.tensor(said, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.data.group)
        return votes.bool().tolist()

    def pause(self) -> None:
        """Where an epoch or an evaluation begins or training ends: all copies have to be there."""
        self.partition.reducer.pause()

    # -- states --------------------------------------------------------------------------------------------------------

    def optimizer_states(self, optimizer: Optimizer, bring: Bring) -> States:
        """An optimizer's states of whole parameters, of those that `bring` brings to this rank.

        Args:
            optimizer: one of those that are divided.
            bring: makes whole tensors of the copies' pieces, given by key; collective.
        """
        sharded = self.partition.sharded(optimizer)
        whole = bring(own_pieces(sharded), list(range(len(sharded.parameters))))
        return {sharded.parameters[number]: dict(fields) for number, fields in whole.items()}

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the states of its parameters, given as its optimizer would have them undivided."""
        self.partition.cover(optimizer)
        load_optimizer_state(self.partition.sharded(optimizer), state)

    @property
    def divided(self) -> frozenset[str]:
        """Names of the parameters that an optimizer updates."""
        return frozenset(entry.name for p, entry in self._entries.items() if self.partition.holds(p))

    @property
    def copied(self) -> frozenset[str]:
        """Names of the parameters of which the optimizer updates a copy of 32 bits."""
        wide, partition = self.partition.options.master_weights, self.partition
        held = [(p, entry.name) for p, entry in self._entries.items() if partition.holds(p)]
        return frozenset(name for parameter, name in held if wide and parameter.dtype in NARROW)

    def parameters(self, bring: Bring, names: Collection[str], wide: bool = False) -> dict[str, Tensor]:
        """The values of whole parameters by name, of those that `bring` brings to this rank.

        Args:
            bring: see `optimizer_states`.
            names: of which parameters that are divided.
            wide: take the copies of 32 bits where there are some.
        """
        own: dict[str, Any] = {}
        if wide and not self._released:
            self.partition.take_over()
        for parameter, entry in self._entries.items():
            part = self.partition.part(parameter, wide) if entry.name in names else None
            if part is not None:
                begin = self.partition.piece(parameter)[0]
                own[entry.name] = {"value": Piece(begin, part.detach().cpu().clone(), parameter.shape)}
        keys = [entry.name for entry in self._entries.values() if entry.name in names]
        return {name: fields["value"] for name, fields in bring(own, keys).items()}

    def refresh(self, masters: Mapping[str, Tensor]) -> None:
        """Whole parameters were written to.

        Args:
            masters: copies of 32 bits by name, of this rank's parameters; the others are made of what was written.
        """
        self.partition.refresh()
        load_masters(self.partition, masters)

    def promise(self, optimizers: Sequence[Optimizer], gathers: int) -> ModelStates:
        """What ZeRO promises this rank of its stages, in bytes; collective, after an optimizer's step.

        Args:
            optimizers: all of them.
            gathers: how often a batch gathers parameters in stage 3.
        """
        states = states_of_partition(self.partition, optimizers, [parameter for _, parameter in self.table.own()])
        return replace(states, gathers=gathers) if self.stage == 3 else states

    def gathered(self) -> list[Tensor]:
        """The vectors in which whole parameters lie while they are gathered; stage 3."""
        return [bucket.flat for bucket in self.partition.buckets if isinstance(bucket, GatheredBucket)]

    def divide_copy(self, copied: nn.Module) -> None:
        """Divide a callback's copy of the model as the model is, and when parameters are added to an optimizer."""
        names = {parameter: entry.name for parameter, entry in self._entries.items()}
        self.partition.filled.append(partial(divide_copy, copied, names, self.partition))
        self.partition.filled[-1]()
        self._copies.append(copied)

    def release(self, failed: bool = False) -> None:
        """Give parameters and optimizers back. Collective in stage 3; after a failure nobody else is asked, and
        parameters of which others have a part raise when they are read."""
        self._released = True
        if failed:
            lend_in_forward(None)
            for name, parameter in ((n, p) for copied in self._copies for n, p in copied.named_parameters()):
                if isinstance(parameter, Closed):
                    lose(parameter, name, parameter.shape)
        else:
            for copied in self._copies:
                make_copy_whole(copied)
            self.windows.hold()
        self.partition.release(failed)

    def begin_of(self, name: str) -> int:
        """From which element on this rank holds a parameter that is divided."""
        parameter = next(parameter for parameter, entry in self._entries.items() if entry.name == name)
        return self.partition.piece(parameter)[0]


def joined(parts: Sequence[Mapping[Any, Mapping[str, Any]]] | None) -> Mapping[Any, Mapping[str, Any]]:
    """Whole tensors of all copies' pieces where they were gathered, nothing elsewhere."""
    return {} if parts is None else join_pieces(parts)
