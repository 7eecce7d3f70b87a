"""A pipeline put together on one rank: the cut model, its parameters, its channels, its engine.

The one idea: this is the only place that knows both which rank holds which stage and how ranks talk; the parts below
know one of the two, the strategy above asks in terms of stages. No Lightning here: the machinery can be run without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.checkpoint.weights import load_noted
from lightning_parallel.pipeline import microbatch
from lightning_parallel.pipeline.boundary import Arrival, Departure
from lightning_parallel.pipeline.channel import Channel, Waiting, nobody_waits
from lightning_parallel.pipeline.clock import make_clock
from lightning_parallel.pipeline.cut import Cut, Recompute
from lightning_parallel.pipeline.data_axis import DataAxis
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.gradients import FreshGradients
from lightning_parallel.pipeline.parameters import Entry, ParameterTable, sum_shared_gradients
from lightning_parallel.pipeline.partition import Partition, lay_out
from lightning_parallel.pipeline.phantom import ForeignParameter, Phantom
from lightning_parallel.pipeline.random_streams import RandomStreams, mix
from lightning_parallel.pipeline.schedule import Action

_DIFFERENT = {
    "batch": (
        "The ranks of one model copy got different rows in {name} (rank {ranks} unlike rank {first}). All stages need"
        " the same rows: seed shuffling and augmentation alike (seed_everything(seed, workers=True)), draw no random"
        " numbers on one rank only, and use no DistributedSampler of your own."
    ),
    "logged": (
        "The ranks logged different values of {name!r} (rank {ranks} unlike rank {first}), so schedulers and callbacks"
        " that watch it would part. Steps run to their end on rank 0 only: what a hook computes from lists or counters"
        " that steps filled is right there only. Log it in the step, or use a torchmetrics object."
    ),
    "groups": (
        "The ranks added different parameters to {name} (rank {ranks} unlike rank {first}). Add the same on every rank;"
        " where a finetuning callback left out parameters whose values equal those of others, pass them to"
        " optimizer.add_param_group yourself."
    ),
}


class Pipeline:
    """One rank's part of a model that runs as a pipeline.

    Args:
        model: the whole model, real or built under `without_memory`; this rank's part of it stays, the rest is freed.
        copies: for every copy of the model (along the data axis) the global rank of each stage.
        device: where this rank computes.
        blocks, partition, stages: see `lay_out`.
        dynamic_shapes, skip_connections: see `Departure`.
        receive_ahead: see `Engine`; default 1 on CPU, 0 on a GPU, where a receive that waits is a kernel that keeps
            multiprocessors from the action before it.
        recompute: see `Cut`.
        group: gives the group of this copy's ranks as it is at the moment; None: the default group.
        data_group: the ranks of this stage in all copies; None: the default group's.
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
        *,
        group: Callable[[], Any] = lambda: None,
        data_group: Any = None,
        blocks: str | Sequence[str] = "auto",
        partition: Partition = "parameters",
        stages: Mapping[str, int] | None = None,
        dynamic_shapes: bool = False,
        skip_connections: bool = False,
        receive_ahead: int | None = None,
        recompute: Recompute = "none",
        fail: Callable[[Exception, Action], Exception] = lambda error, action: error,
        waiting: Waiting = nobody_waits,
    ) -> None:
        self.model, self.device, self.waiting, self._group = model, device, waiting, group
        self.rank, self._copies = dist.get_rank(), [tuple(ranks) for ranks in copies]
        self.copy = next(i for i, ranks in enumerate(self._copies) if self.rank in ranks)
        self.ranks = self._copies[self.copy]
        self.stage = self.ranks.index(self.rank)
        self.data = DataAxis([ranks[self.stage] for ranks in self._copies], data_group, waiting)
        layout = lay_out(model, len(self.ranks), blocks, partition, stages)
        self.table = ParameterTable(model, layout, self.stage)
        self._refuse_other_cut()
        seed = self._agree_on_seed()
        self.table.drop_foreign(device)
        self.table.materialize(device, seed)
        load_noted(model)
        self.own: list[tuple[Entry, nn.Parameter]] = list(self.table.own())
        self.foreign = [parameter for parameter in model.parameters() if isinstance(parameter, ForeignParameter)]
        self.gradients = FreshGradients([parameter for _, parameter in self.own])
        self._all = [model.get_parameter(entry.name) for entry in self.table.entries]
        self.to_device(device)
        self._groups = self._open_groups()
        self._equalize_shared()
        self.data.equalize([parameter.data for _, parameter in self.own] + self.own_buffers())
        self.streams = RandomStreams(mix(seed, self.copy) if self.copy else seed, device)
        self.cut = Cut(model, layout, device, self.streams, recompute, self.stage)
        self.clock = make_clock(device)
        arrival, departure = self._open_boundaries(dynamic_shapes, skip_connections, waiting)
        self._news = {
            rank: Channel(self.ranks[-1], rank, 2 * self.num_stages + stage, device, waiting=waiting)
            for stage, rank in enumerate(self.ranks[:-1])
        }
        if receive_ahead is None:
            receive_ahead = 1 if device.type == "cpu" else 0
        self.engine = Engine(self.cut, self.stage, arrival, departure, self.clock, fail, receive_ahead)

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    def to_device(self, device: torch.device) -> None:
        """Move this rank's parameters (and their gradients) and buffers."""
        for _, parameter in self.own:
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and not isinstance(buffer, Phantom):
                    module._buffers[name] = buffer.to(device)

    def own_buffers(self) -> list[Tensor]:
        """The buffers that this rank holds."""
        return [buffer for buffer in self.model.buffers() if not buffer.is_meta and not isinstance(buffer, Phantom)]

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

    def check_same(self, what: str, values: Mapping[str, Any]) -> None:
        """Do all ranks of this model copy hold the same? Names that only some ranks have are not compared.

        Raises:
            ValueError: they do not, naming the ranks.
        """
        if self.num_stages == 1:
            return
        everyone, ranks = self.all_gather({name: _digest(value) for name, value in values.items()}), sorted(self.ranks)
        for name, mine in everyone[0].items():
            others = [str(rank) for rank, theirs in zip(ranks, everyone, strict=True) if theirs.get(name, mine) != mine]
            if others:
                raise ValueError(_DIFFERENT[what].format(name=name, ranks=", ".join(others), first=ranks[0]))

    def check_heard(self, what: str, mine: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """Does this rank hold what the loss stage told? Names that only one of them has are not compared.

        Raises:
            ValueError: it does not.
        """
        for name, value in told.items():
            if repr(mine.get(name, value)) != repr(value):
                raise ValueError(_DIFFERENT[what].format(name=name, ranks=self.rank, first=min(self.ranks)))

    # -- collectives over the stages -----------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor) -> None:
        """Give every stage the loss stage's tensor, in place."""
        if self.num_stages > 1:
            with self.waiting("a value of the loss stage"):
                dist.broadcast(tensor, self.ranks[-1], group=self._group())

    def tell(self, value: Any) -> None:
        """Send an object from the loss stage to every other rank over the host, without waiting."""
        for channel in self._news.values():
            channel.send_object(value)

    def settle(self) -> None:
        """On the loss stage, once for each thing that all ranks hear: let go of what was told before the last call."""
        for channel in self._news.values():
            channel.settle()

    def hear(self, what: str = "what the loss stage logged") -> Any:
        """Receive what the loss stage told; `what` says in an error what is waited for."""
        return self._news[self.rank].receive_object(what)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all stages, in place."""
        if self.num_stages > 1:
            with self.waiting("the other stages, to add up a value"):
                dist.all_reduce(tensor, group=self._group())

    def all_reduce_over(self, tensor: Tensor, stages: Sequence[int]) -> None:
        """Sum over the stages that share a parameter, in place."""
        with self.waiting("the stages that share a parameter"):
            dist.all_reduce(tensor, group=self._groups[tuple(stages)])

    def sum_shared(self, gradients: dict[str, Tensor | None]) -> None:
        """Sum the gradients of parameters that several stages hold; None stays None where no stage made one.

        Who made one is agreed on the host, and only where there are bare parameters (a unit uses its own) or the device
        is the host anyway: it makes the stages' hosts wait for each other.
        """
        shared = self.table.shared()
        if not shared:
            return
        made = torch.tensor([float(gradients.get(entry.name) is not None) for entry in shared])
        if self.device.type == "cpu" or any(entry.bare for entry in shared):
            self.all_reduce(made)
        else:
            made.fill_(1.0)
        used = [entry for entry, count in zip(shared, made.tolist(), strict=True) if count]
        sum_shared_gradients(self.table, used, gradients, self.all_reduce_over)

    def all_gather(self, value: Any) -> list[Any]:
        """The object of every rank of this copy, in the order of global ranks, over the host."""
        if self.num_stages == 1:
            return [value]
        box: list[Any] = [None] * self.num_stages
        with self.waiting("the other stages, to compare notes"):
            dist.all_gather_object(box, value, group=self._group())
        return box

    def gather(self, value: Any) -> list[Any] | None:
        """Every stage's object in the order of stages on the loss stage's rank, None elsewhere; over the host."""
        if self.num_stages == 1:
            return [value]
        box: list[Any] | None = [None] * self.num_stages if self.rank == self.ranks[-1] else None
        with self.waiting("the other stages, to gather the model's state"):
            dist.gather_object(value, box, dst=self.ranks[-1], group=self._group())
        return None if box is None else [box[sorted(self.ranks).index(rank)] for rank in self.ranks]

    # -- putting it together -------------------------------------------------------------------------------------------

    def _refuse_other_cut(self) -> None:
        gone = [entry.name for entry, parameter in self.table.own() if isinstance(parameter, ForeignParameter)]
        if gone:
            raise ValueError(
                f"This process gave `{gone[0]}` and {len(gone) - 1} other parameters of stage {self.stage} away when"
                " the module was cut before, for another number of stages or another partition. Build the module anew"
                " and load a checkpoint."
            )

    def _agree_on_seed(self) -> int:
        """A seed that all ranks of all copies have."""
        seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
        self.broadcast(seed)
        self.data.equalize([seed])
        return int(seed)

    def _open_groups(self) -> dict[tuple[int, ...], Any]:
        """A group for each set of stages that shares a parameter; all ranks open all copies' in one order."""
        groups = {}
        for stages in sorted({entry.stages for entry in self.table.shared()}):
            opened = [dist.new_group([ranks[s] for s in stages]) for ranks in self._copies]
            groups[stages] = opened[self.copy]
        return groups

    def _equalize_shared(self) -> None:
        """Copies of a shared parameter begin equal, even where processes were not seeded."""
        for entry, parameter in self.own:
            if len(entry.stages) > 1:
                dist.broadcast(parameter.data, self.ranks[entry.stages[0]], group=self._groups[entry.stages])

    def _open_boundaries(
        self, dynamic_shapes: bool, skip_connections: bool, waiting: Waiting
    ) -> tuple[Arrival | None, Departure | None]:
        arrival, departure = None, None
        for copy, ranks in enumerate(self._copies):
            for stage, (here, there) in enumerate(pairwise(ranks)):
                forward = self._open_channel(here, there, 2 * stage, waiting)
                backward = self._open_channel(there, here, 2 * stage + 1, waiting)
                if (copy, stage) == (self.copy, self.stage):
                    departure = Departure(stage, forward, backward, dynamic_shapes, skip_connections)
                if (copy, stage + 1) == (self.copy, self.stage):
                    arrival = Arrival(stage + 1, forward, backward, dynamic_shapes)
        return arrival, departure

    def _open_channel(self, source: int, target: int, tag: int, waiting: Waiting) -> Channel:
        group = dist.new_group([source, target], backend="nccl") if self.device.type == "cuda" else None
        channel = Channel(source, target, tag, self.device, None, group, waiting)
        channel.warm_up(self.rank)
        return channel


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters registered inside get no memory (they land on the meta device); buffers stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _digest(batch: Any) -> str:
    digest = hashlib.sha256()
    for leaf in microbatch.leaves(batch):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return digest.hexdigest()
