"""From what the user wishes and the module's optimizer to a job of servers, the same on every worker.

The one idea: a plan is made on every worker from the same arguments, and rank 0's weights and optimizer state are what
servers begin with. Left out: the run itself (``worker.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.parameter_server.consistency import Asynchronous, Consistency, Sandblaster
from lightning_parallel.parameter_server.filters import Precision
from lightning_parallel.parameter_server.from_torch import Rates, groups_of, initial_ranges, update_of
from lightning_parallel.parameter_server.hosting import Beginning
from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.rules import Rules
from lightning_parallel.parameter_server.table import Table
from lightning_parallel.parameter_server.trainer.sandblaster.batch_worker import BatchWorker
from lightning_parallel.parameter_server.trainer.sandblaster.coordinator import SandblasterCoordinator
from lightning_parallel.parameter_server.trainer.versions import Versions
from lightning_parallel.parameter_server.trainer.worker import CountingFilters, Pace, ServerWorker
from lightning_parallel.parameter_server.transport.session import WorkerSession
from lightning_parallel.parameter_server.updates import AddDelta, Update
from lightning_parallel.parameter_server.worker.island import Follower, Island

_RANGES_A_SERVER = 4  # so that consistent hashing spreads them
_BACKUP_AFTER = 2.0  # times as long as the slowest portion that is done


@dataclass(frozen=True)
class Wishes:
    """The arguments of `ParameterServerStrategy`, see there.

    Raises:
        ValueError: they do not go together.
    """

    consistency: Consistency
    num_servers: int
    replication: int
    update: Literal["server", "worker"] | Update
    filters: tuple[Any, ...]
    n_push: int
    n_fetch: int
    scale: Literal["mean", "sum"]
    lease: float

    def __post_init__(self) -> None:
        if self.replication > self.num_servers:
            raise ValueError(
                f"replication={self.replication} needs as many servers, got num_servers={self.num_servers}."
            )
        if (self.n_push, self.n_fetch) != (1, 1) and not isinstance(self.consistency, Asynchronous):
            raise ValueError(
                f"n_push={self.n_push}, n_fetch={self.n_fetch} with {self.consistency}: a step is a clock there. Use"
                ' Trainer(accumulate_grad_batches=...), or consistency="downpour".'
            )
        if isinstance(self.consistency, Sandblaster):
            self._refuse_pushes()
        if sum(isinstance(one, Precision) for one in self.filters) > 1:
            raise ValueError(f"filters={list(self.filters)} have more than one number format. Use one.")

    def _refuse_pushes(self) -> None:
        """Raise for what is about pushes, where nobody pushes."""
        plain = {"update": "server", "filters": (), "n_push": 1, "n_fetch": 1, "scale": "mean"}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f'{name}={getattr(self, name)!r} with consistency="sandblaster": nobody pushes there; servers make'
                    f" the steps of torch.optim.LBFGS, of gradients that workers send as they are. Leave {name} out."
                )

    def make_filters(self) -> CountingFilters | None:
        """A worker's filters, None if pushes go as they are."""
        if not self.filters:
            return None
        formats = [one for one in self.filters if isinstance(one, Precision)]
        selectors = [one for one in self.filters if one not in formats]
        return CountingFilters(selectors, formats[0] if formats else None)


class ServerPlan:
    """A job's table, update and rules.

    Args:
        wishes: of the user.
        optimizers: the module's; one.
        num_workers: that take part.
        name: of the strategy, for messages.

    Raises:
        ValueError: there is none or more than one optimizer, or the servers do not know it.
    """

    def __init__(self, wishes: Wishes, optimizers: Sequence[Optimizer], num_workers: int, name: str) -> None:
        if len(optimizers) != 1:
            raise ValueError(
                f"{name} got {len(optimizers)} optimizers, but a clock is one optimizer's step. Use one,"
                " or ZeROStrategy(stage=2), which runs several (a GAN) with manual optimization as they are."
            )
        if type(optimizers[0]).__name__ == "_MockOptimizer":  # Lightning's
            raise ValueError(
                f"{name} has the servers make an optimizer's steps, and configure_optimizers returned None. Return an"
                ' optimizer, or train without one under another strategy ("ddp").'
            )
        self.wishes, self.num_workers = wishes, num_workers
        self.optimizer = optimizers[0]
        self.is_together = isinstance(wishes.consistency, Sandblaster)
        groups = groups_of(self.optimizer)
        refuse_parameters(groups, name)
        many = wishes.num_servers > 1
        self.table = Table.of(groups, _RANGES_A_SERVER * wishes.num_servers if many else 1)
        self.update = self._update(name)
        self.rules = Rules(
            self.table.layout, self.update, wishes.consistency, wishes.scale,
            replicas=wishes.replication, lease=wishes.lease, backup_after=_BACKUP_AFTER,
        )  # fmt: skip

    @property
    def has_optimizer_on_servers(self) -> bool:
        """Whether the servers hold the state of the module's own optimizer."""
        return self.wishes.update == "server" and not self.is_together

    def _update(self, name: str) -> Update:
        if self.is_together:
            if type(self.optimizer) is not torch.optim.LBFGS:
                raise ValueError(
                    f'{name}(consistency="sandblaster") has the servers make the steps of torch.optim.LBFGS, and'
                    f" configure_optimizers returned {type(self.optimizer).__name__}. Return an LBFGS, or use"
                    ' consistency="bsp".'
                )
            return AddDelta()
        if type(self.optimizer) is torch.optim.LBFGS and self.wishes.update == "server":
            raise ValueError(
                "The servers know SGD, Adagrad, Adam, AdamW, and this is LBFGS, whose steps are of all workers"
                f' together. Have the servers make those, with {name}(consistency="sandblaster").'
            )
        if isinstance(self.wishes.update, Update):
            return self.wishes.update
        if self.wishes.update == "worker":
            return AddDelta()
        try:
            return update_of(self.optimizer, self.table.widths)
        except ValueError as error:
            raise ValueError(
                f'{error} Let each worker run it, with {name}(update="worker"): servers then add what it changed.'
            ) from None

    def beginning(self) -> Beginning:
        """What servers begin with: this worker's weights, and its optimizer's state."""
        weights = self.table.pack(groups_of(self.optimizer))
        state = self.optimizer if self.has_optimizer_on_servers else None
        ranges = initial_ranges(self.table, self.update, weights, state)
        return Beginning(self.rules, ranges, self.wishes.num_servers, self.num_workers)

    def join(
        self, job: Job, rank: int, versions: Versions, timeout: float, era: int = 0, island: Island | None = None
    ) -> ServerWorker:
        """Take part in a job, in which a read may wait so many seconds for the slowest worker."""
        pace = Pace(self.wishes.n_push, self.wishes.n_fetch)
        if self.is_together:
            return self._join_together(job, rank, versions, timeout, era)
        session: WorkerSession | Follower
        meet = None if island is None else island.meet
        if island is None or island.leads:
            session = job.join(f"worker {rank}", self.wishes.make_filters(), timeout).start()
        else:
            session, island = Follower(island, self.table.layout.size), None
        worker = ServerWorker(session, self.table, self.optimizer, self._rates(), pace, rank, versions, era, island)
        worker.together = meet or worker.together
        return worker

    def _join_together(self, job: Job, rank: int, versions: Versions, timeout: float, era: int) -> BatchWorker:
        session = job.join(f"worker {rank}", None, timeout).start()
        worker = BatchWorker(session, self.table, self.optimizer, self._rates(), Pace(), rank, versions, era)
        worker.helping = job.help(f"worker {rank}", timeout).start()
        if rank == 0:
            optimizer = cast(torch.optim.LBFGS, self.optimizer)
            worker.coordinator = SandblasterCoordinator(job.coordinate(timeout=timeout).start(), optimizer, self.table)
        return worker

    def _rates(self) -> Rates | None:
        if self.wishes.update == "worker":
            return None
        return Rates(self.optimizer, self.update)

    def not_held(self, module: nn.Module) -> dict[str, Tensor]:
        """What of a module's state the servers do not hold."""
        held = {id(parameter) for group in groups_of(self.optimizer) for parameter in group}
        named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        state = module.state_dict()
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and id(named.get(k)) not in held}


def refuse_parameters(groups: Sequence[Sequence[Tensor]], name: str) -> None:
    """Raise for parameters that a table of float32 numbers cannot hold.

    Raises:
        ValueError: a parameter is of 64 bits, or complex.
    """
    for parameter in (parameter for group in groups for parameter in group):
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"{name} got a parameter of {parameter.dtype}, but the servers hold float32. Use module.float()."
            )
