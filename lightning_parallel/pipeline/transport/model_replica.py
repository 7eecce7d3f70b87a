"""The ranks that hold one copy of a model: who is where, and what they say to each other.

The one idea: steps end where the last stage is, and all ranks have to know what came of it; whoever asks for a value of
all, or tells one to all, speaks in terms of stages. Left out: what travels from stage to stage within a step
(``pipeline/stage/boundary.py``), gradients (``pipeline/runtime/assembly.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.failure.patience import Moving
from lightning_parallel.pipeline.batch.digest import digest_of
from lightning_parallel.pipeline.transport.channel import Channel, Waiting

_FILLED = {  # by whether steps end on several ranks
    False: "Steps run to their end on rank 0 only: what a hook computes from lists or counters that steps filled is"
    " right there only.",
    True: "With a schedule of two directions steps end on several ranks: what a hook computes from lists or counters"
    " that steps filled is of a rank's own micro-batches.",
}
_DIFFERENT = {
    "batch": (
        "The ranks of one model copy got different rows in {name} (rank {ranks} unlike rank {first}). All stages need"
        " the same rows: seed shuffling and augmentation alike (seed_everything(seed, workers=True)), draw no random"
        " numbers on one rank only, and use no DistributedSampler of your own."
    ),
    "logged": (
        "The ranks logged different values of {name!r} (rank {ranks} unlike rank {first}), so schedulers and callbacks"
        " that watch it would part. {why} Log it in the step, or use a torchmetrics object."
    ),
    "loss": (
        "The ranks of the tensor axis see the same rows and came to different losses in {name} (rank {ranks} unlike"
        " rank {first}). Each holds a part of what tensor_plan cuts, and of its gradient: a step or a hook that reads"
        " these by itself (norms, clipping, penalties) has those of the part. Use the optimizer's weight_decay,"
        " self.clip_gradients(...) or Trainer(gradient_clip_val=...), or leave the modules out of tensor_plan; for a"
        " penalty on gradients use ZeROStrategy(stage=1) or stage=2, which hold the whole model in a step. A"
        ' head that is cut "colwise" hands on a part of its outputs: cut it "vocab", which gathers them.'
    ),
    "groups": (
        "The ranks added different parameters to {name} (rank {ranks} unlike rank {first}). Add the same on every rank;"
        " where a finetuning callback left out parameters whose values equal those of others, pass them to"
        " optimizer.add_param_group yourself."
    ),
}


class ModelReplica:
    """One copy of a model on its ranks, as one of them sees it.

    Args:
        copies: for every copy of the model the global rank of each row of the schedule. Those along the tensor axis,
            which see the same rows, are neighbours.
        placement: for every stage (of every replica) the row that holds it.
        device: where this rank computes.
        group: gives the group of this copy's ranks as it is at the moment.
        waiting: a context entered while this process is blocked in a receive.
        tensor_size: so many neighbouring copies see the same rows.
        mates_group: gives the group of all ranks that see this rank's rows as it is at the moment.

    Attributes:
        copy: which one is this rank's.
        mates: all ranks that see this rank's rows, in order.
        ranks: its ranks, by row.
        first_ranks: those of the first one along the tensor axis.
        loss_rank: its rank that holds the last stage (of the first replica).
        reports: channels by row from the other ranks that end steps to that one.
    """

    def __init__(
        self,
        copies: Sequence[Sequence[int]],
        placement: Mapping[tuple[int, int], int],
        device: torch.device,
        group: Callable[[], Any],
        waiting: Waiting,
        tensor_size: int = 1,
        mates_group: Callable[[], Any] | None = None,
    ) -> None:
        self.device, self.waiting, self._group = device, waiting, group
        self._mates_group, self.tensor_size = mates_group or group, tensor_size
        self.rank, self.copies = dist.get_rank(), [tuple(ranks) for ranks in copies]
        self.copy = next(i for i, ranks in enumerate(self.copies) if self.rank in ranks)
        self.ranks = self.copies[self.copy]
        first = self.copy // tensor_size * tensor_size
        self.first_ranks = self.copies[first]
        self.mates = tuple(sorted(rank for ranks in self.copies[first : first + tensor_size] for rank in ranks))
        self.row = self.ranks.index(self.rank)
        self.placement = dict(placement)
        self.num_stages = 1 + max(stage for _, stage in self.placement)
        self.num_replicas = 1 + max(replica for replica, _ in self.placement)
        self.loss_rows = tuple(dict.fromkeys(self.placement[r, self.num_stages - 1] for r in range(self.num_replicas)))
        self.loss_rank = self.ranks[self.loss_rows[0]]
        tags = len(self.placement)  # those of boundaries are below 2 * tags
        self._news = {
            rank: Channel(self.loss_rank, rank, 2 * tags + row, device, waiting=waiting)
            for row, rank in enumerate(self.ranks)
            if rank != self.loss_rank
        }
        self.reports = {
            row: Channel(self.ranks[row], self.loss_rank, 3 * tags + row, device, waiting=waiting)
            for row in self.loss_rows[1:]
        }

    @property
    def num_ranks(self) -> int:
        """How many ranks hold a copy of the model."""
        return len(self.ranks)

    @property
    def at_loss(self) -> bool:
        """Whether this rank holds the last stage (of the first replica), where all that steps give is known."""
        return self.rank == self.loss_rank

    @property
    def ends_steps(self) -> bool:
        """Whether steps run to their end on this rank: it holds the last stage of some replica."""
        return self.row in self.loss_rows

    @property
    def both_ways(self) -> bool:
        """Whether steps end on several ranks, each for its own micro-batches."""
        return len(self.loss_rows) > 1

    # -- collectives ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor) -> None:
        """Give every stage the loss stage's tensor, in place."""
        if self.num_ranks > 1:
            with self.waiting("a value of the loss stage"):
                dist.broadcast(tensor, self.loss_rank, group=self._group())

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
        if self.num_ranks > 1:
            with self.waiting("the other stages, to add up a value"):
                dist.all_reduce(tensor, group=self._group())

    def all_reduce_over_mates(self, tensor: Tensor) -> None:
        """Sum over all ranks that see this rank's rows, in place."""
        if len(self.mates) > 1:
            with self.waiting("the other stages, to add up a value"):
                dist.all_reduce(tensor, group=self._mates_group())

    def all_gather(self, value: Any) -> list[Any]:
        """The object of every rank of this copy, in the order of global ranks, over the host."""
        return self._all_gather(value, self.num_ranks, self._group)

    def all_gather_of_first(self, value: Any) -> list[Any]:
        """The object of every rank of `first_ranks`, given to all ranks that see this rank's rows, over the host."""
        everyone = zip(self.mates, self._all_gather(value, len(self.mates), self._mates_group), strict=True)
        return [theirs for rank, theirs in everyone if rank in self.first_ranks]

    def _all_gather(self, value: Any, count: int, group: Callable[[], Any]) -> list[Any]:
        if count == 1:
            return [value]
        box: list[Any] = [None] * count
        with self.waiting("the other stages, to compare notes"):
            dist.all_gather_object(box, value, group=group())
        return box

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's object in the order of rows on the loss stage's rank, None elsewhere; over the host."""
        if self.num_ranks == 1:
            return [value]
        box: list[Any] | None = [None] * self.num_ranks if self.rank == self.loss_rank else None
        with self.waiting(Moving("the other stages, to gather the model's state")):
            dist.gather_object(value, box, dst=self.loss_rank, group=self._group())
        return None if box is None else [box[sorted(self.ranks).index(rank)] for rank in self.ranks]

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_same(self, what: str, values: Mapping[str, Any]) -> None:
        """Do all ranks that see the same rows hold the same? Names that only some ranks have are not compared.

        Raises:
            ValueError: they do not, naming the ranks.
        """
        if len(self.mates) == 1:
            return
        mine = {name: digest_of(value) for name, value in values.items()}
        everyone, ranks = self._all_gather(mine, len(self.mates), self._mates_group), self.mates
        for name, first in everyone[0].items():
            others = [
                str(rank) for rank, theirs in zip(ranks, everyone, strict=True) if theirs.get(name, first) != first
            ]
            if others:
                raise ValueError(self._unlike(what, name, ", ".join(others)))

    def check_heard(self, what: str, mine: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        """Does this rank hold what the loss stage told? Names that only one of them has are not compared.

        Raises:
            ValueError: it does not.
        """
        for name, value in told.items():
            if repr(mine.get(name, value)) != repr(value):
                raise ValueError(self._unlike(what, name, str(self.rank)))

    def _unlike(self, what: str, name: str, ranks: str) -> str:
        why = _FILLED[self.both_ways]
        return _DIFFERENT[what].format(name=name, ranks=ranks, first=self.mates[0], why=why)
