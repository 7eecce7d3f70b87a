"""`ParameterServerStrategy`: weights and optimizer on servers, workers that wait for each other as little as wanted.

The one idea: no default process group, since with one Lightning waits for rank 0 before every batch. A worker meets the
others at the hub (`MeetingStrategy`) where an epoch, an evaluation or a checkpoint needs all, and in steps talks to
servers alone (`ServerWorker`).
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.server.consistency import Consistency
from lightning_parallel.server.filters import Precision, Selector
from lightning_parallel.server.from_torch import optimizer_state
from lightning_parallel.server.island import Island
from lightning_parallel.server.launcher import Job
from lightning_parallel.server.names import gap_bound, rule_of
from lightning_parallel.server.transport.pyzmq import refuse_missing
from lightning_parallel.server.transport.session import LeaseLostError
from lightning_parallel.server.updates import Update
from lightning_parallel.strategies.arguments import all_are, is_count, is_positive, refuse_arguments
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.checkpoints import unwrapped
from lightning_parallel.strategies.meeting import MeetingStrategy
from lightning_parallel.trainer.dealt_rows import DealtRows
from lightning_parallel.trainer.external_hub import ExternalHub
from lightning_parallel.trainer.far_servers import Placement, start_servers
from lightning_parallel.trainer.hosts import Hosts, watch
from lightning_parallel.trainer.hub import SERVE
from lightning_parallel.trainer.left_behind import KEY, left_behind, take_up
from lightning_parallel.trainer.line import JOIN, first_of
from lightning_parallel.trainer.new_worker import load_state, state_of
from lightning_parallel.trainer.server_plan import Plan, Wishes
from lightning_parallel.trainer.server_worker import ServerWorker
from lightning_parallel.trainer.shared_values import (
    Gather,
    average_into,
    connect_metrics,
    running_statistics,
)
from lightning_parallel.trainer.shown_values import read_when_shown
from lightning_parallel.trainer.versions import Versions

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import ClusterEnvironment

_FILTER_WORDS = "a list of selectors and number formats of lightning_parallel.server.filters, such as [TopK(0.1)]"


class ParameterServerStrategy(MeetingStrategy):
    """Data parallelism through parameter servers, synchronous or as stale as wanted.

    Every worker trains on its own rows, pushes its gradients to the servers and reads weights back. The servers make
    the steps of the module's own optimizer (SGD, Adagrad, Adam, AdamW, with any groups); a push is divided by the
    number of workers, so that any number has the learning rate of one. With "bsp" a step is DistributedDataParallel's.

    Args:
        consistency: "bsp": a step is all workers' together. "ssp": at a read no worker is more than ``staleness`` steps
            ahead of the slowest; "essp": the same, and servers send weights unasked; "bounded_delay": the same, and a
            read does not wait for the worker's own pushes. "async" and "downpour": nobody waits. Or a rule of
            `lightning_parallel.server.consistency`.
        staleness: see `lightning_parallel.server.names.rule_of`.
        num_servers: server processes; of several hosts, server i is on host i mod ``server_nodes``.
        replication: servers that hold a piece of the weights, on different hosts as long as there are any; one less may
            die at a time.
        update: "server"; "worker": each worker runs the optimizer itself, whichever it is, and servers add what it
            changed, divided by the number of workers; or an update of `lightning_parallel.server.updates`, with its own
            learning rate.
        filters: what pushes go through: selectors and at most one number format of `lightning_parallel.server.filters`.
        n_push: "async" and "downpour": steps whose gradients are added up for one push.
        n_fetch: "async" and "downpour": steps from read to read; in between a worker follows its own gradients.
        scale: "mean" divides pushes by the number of workers, "sum" does not.
        lease: seconds of silence after which a worker or server counts as gone (one that died is seen at once).
        island_size: ranks, one behind the other, that step together as under DistributedDataParallel and are one worker
            to the servers; staleness is between islands.
        server_nodes: hosts that servers are spread over, from rank 0's on; None for all.
        restarts: how many workers that were killed are replaced by new ones, which join at an epoch's start; under
            torchrun, SLURM and the like whoever starts workers has to start one again with the rank that it had.
        start_method: "fork" or "spawn", processes of this one; "popen" runs the script again.
        **kwargs: see `MeshStrategy`; `timeout` is how long a read may wait for the slowest worker.

    Raises:
        ValueError: an argument is not as described.
        ModuleNotFoundError: pyzmq is not installed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = ParameterServerStrategy("ssp", staleness=3)
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy)  # doctest: +SKIP

    Source:
        Ho et al., NIPS 2013 (SSP); Dean et al., NIPS 2012 (Downpour); Li et al., OSDI 2014 (servers, bounded delay).
    """

    def __init__(
        self,
        consistency: str | Consistency = "bsp",
        staleness: int | None = None,
        num_servers: int = 1,
        replication: int = 1,
        update: Literal["server", "worker"] | Update = "server",
        filters: Sequence[Selector | Precision] | None = None,
        n_push: int = 1,
        n_fetch: int = 1,
        scale: Literal["mean", "sum"] = "mean",
        lease: float = 10.0,
        island_size: int = 1,
        restarts: int = 0,
        server_nodes: int | None = None,
        start_method: StartMethod = "fork",
        **kwargs: Any,
    ) -> None:
        refuse_missing()
        super().__init__(start_method=start_method, **kwargs)
        counts = {"num_servers": num_servers, "replication": replication, "n_push": n_push, "n_fetch": n_fetch}
        right = isinstance(update, Update) or update in ("server", "worker")
        refuse_arguments(
            self,
            staleness=(staleness, staleness is None or is_count(staleness, 0), "a count, 0 or more"),
            update=(update, right, '"server", "worker" or an update of lightning_parallel.server.updates'),
            scale=(scale, scale in ("mean", "sum"), '"mean" or "sum"'),
            server_nodes=(server_nodes, server_nodes is None or is_count(server_nodes, 1), "a count, 1 or more"),
            restarts=(restarts, is_count(restarts, 0), "a count, 0 or more"),
            lease=(lease, is_positive(lease), "a number of seconds above 0"),
            filters=(filters, not filters or all_are(filters, (Selector, Precision)), _FILTER_WORDS),
            island_size=(island_size, is_count(island_size, 1), "a count, 1 or more"),
            **{name: (value, is_count(value, 1), "a count, 1 or more") for name, value in counts.items()},
        )
        rule = rule_of(consistency, staleness)
        self.wishes = Wishes(
            rule, num_servers, replication, update, tuple(filters or ()), n_push, n_fetch, scale, lease
        )  # fmt: skip
        if restarts and island_size > 1:
            raise ValueError(
                f"{type(self).__name__}(restarts={restarts}, island_size={island_size}): an island ends when a member"
                " dies, and none begins in a run. Use restarts=0, or island_size=1."
            )
        self.restarts, self.island_size, self.server_nodes = restarts, island_size, server_nodes
        self.island: Island | None = None
        self.worker: ServerWorker | None = None
        self.rows: DealtRows | None = None
        self.versions: Versions | None = None
        self._external: ExternalHub | None = None
        self._plan: Plan | None = None
        self._job: Job | None = None
        self._hosts: Hosts | None = None
        self._left_behind: list[dict[str, Any]] = []  # by the workers of a checkpoint
        self._undo: Callable[[], None] | None = None

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def num_islands(self) -> int:
        """Workers that the servers see."""
        return self.world_size // self.island_size

    @property
    def placement(self) -> Placement:
        """Which server is on which host."""
        return Placement(self.wishes.num_servers, min(self.server_nodes or self.num_nodes, self.num_nodes))

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        from lightning_parallel.trainer.launchers import make_launcher
        from lightning_parallel.trainer.worker_launcher import WorkerLauncher

        environment = self.cluster_environment
        externally = environment is not None and environment.creates_processes_externally
        if self.start_method == "popen" or externally:
            if self.restarts and not externally:
                raise ValueError(
                    f"{type(self).__name__}(restarts={self.restarts}) starts workers again, but here others start them."
                    ' Use start_method="fork" or "spawn", or restarts=0.'
                )
            self._launcher = make_launcher(self)
        else:
            self._launcher = WorkerLauncher(self, self.start_method, self.restarts, self.island_size)

    def setup_environment(self) -> None:
        if self.num_nodes > 1 and self._line is not None:
            raise ValueError(
                f"{type(self).__name__}(start_method={self.start_method!r}) starts workers of one host, got"
                f' num_nodes={self.num_nodes}. Use torchrun or SLURM, or start_method="popen".'
            )
        if self.num_processes % self.island_size:
            raise ValueError(
                f"{type(self).__name__}(island_size={self.island_size}) got {self.num_processes} devices, which are no"
                f" whole number of islands. Use a multiple of {self.island_size}."
            )
        ParallelStrategy.setup_environment(self)
        self.set_world_ranks()
        if self._line is None:
            assert self.cluster_environment is not None
            if self._external is not None:
                self._external.close()
            self._external = self._external_hub(self.cluster_environment)
            self._line = self._external.line
        self.watch = cast(Any, self._line)
        launcher = cast(Any, self.launcher)
        if hasattr(launcher, "joined"):
            launcher.joined(self.watch)

    def _external_hub(self, environment: ClusterEnvironment) -> ExternalHub:
        rank, world, port = self.global_rank, self.world_size, environment.main_port
        if self.num_nodes > 1:
            self._hosts = Hosts.meet(environment.main_address, port, rank, world, self.timeout)
        near, placement = self.node_rank == 0, self.placement
        hub = ExternalHub(
            rank, world, port, island_size=self.island_size, hosts=self._hosts, is_near=near,
            num_far=len(placement.far), restarts=self.restarts,
        )  # fmt: skip
        if self._hosts is not None and not near and self.local_rank == 0 and not hub.line.is_new:
            start_servers(self._hosts, self.node_rank, placement.on(self.node_rank))
        return hub

    def setup(self, trainer: Trainer) -> None:
        ParallelStrategy.setup(self, trainer)
        assert self._line is not None
        self.rows = DealtRows(trainer, self._line, self._meet, self._welcome)
        if self._line.is_new:
            trainer.num_sanity_val_steps = 0  # it has no weights yet
        self._read_shown = read_when_shown(trainer)
        self._undo = connect_metrics(self._module, Gather(self.all_gathered, lambda: not self._in_step))

    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers that are still there; at the start of a fit, start the servers."""
        if self._line is None:
            if self._external is not None:  # `trainer.save_checkpoint` after the run
                self._external.line.meet(f"barrier {name or ''}".rstrip())
            return
        self._meet(f"barrier {name or ''}".rstrip())
        if name == "run-stage" and self._module.trainer.state.fn == TrainerFn.FITTING and self.optimizers:
            self._start()

    def process_dataloader(self, dataloader: object) -> object:
        """Have the rows of training loaders dealt by the hub."""
        if self.rows is not None and self._module.trainer.training:
            self.rows.take(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        if self.restarts and (self.rows is None or not self.rows.are_dealt):
            raise ValueError(
                f"{type(self).__name__}(restarts={self.restarts}): new workers join where rows are dealt to them, but"
                " the training loader deals for itself, or evaluations come within epochs. Use one loader with"
                " Lightning's sampler (use_distributed_sampler=True) and val_check_interval=1.0, or restarts=0."
            )

    def _start(self) -> None:
        """Have servers started with rank 0's weights and optimizer state, and join them."""
        assert self._line is not None
        module, line = self._module, self._line
        plan = self._plan = Plan(self.wishes, self.optimizers, self.num_islands, type(self).__name__)
        if line.is_new:
            return  # until it is let in
        begins = plan.beginning() if self.global_rank == 0 else None
        self._job = pickle.loads(first_of(line.meet_raw(SERVE, begins), self.global_rank))
        if self._hosts is not None:
            self._job = self._hosts.place(self._job, line.connection)
        if self.island_size > 1:
            self.island = self._found_island()
        worker = self._take_part()
        rest = {name: value.cpu() for name, value in plan.not_held(module).items()} if self.global_rank == 0 else None
        module.load_state_dict(first_of(line.meet("what servers do not hold", rest), 0), strict=False)
        worker.pull()
        worker.session.await_replicas()
        self.worker = worker

    def _take_part(self, era: int = 0) -> ServerWorker:
        assert self._line is not None and self._plan is not None and self._job is not None
        line, bound = self._line, gap_bound(self.wishes.consistency)
        self.versions = Versions(self.num_islands, bound, lambda since: line.ask("order", since), self.everyone)
        worker = self._plan.join(
            self._job, self.global_rank, self.versions, self.timeout.total_seconds(), era, self.island
        )
        if self.rows is not None:
            worker.before_push = self.rows.note
        if self._hosts is not None:
            client = worker.session.client
            watch(line.connection, lambda: setattr(client, "lost", True))  # its reads wait for nothing any more
        filters = worker.session.client.filters
        if filters is not None and self._left_behind and not line.is_new:
            own = self.global_rank // self.island_size
            take_up(filters, self._plan.table, self._left_behind, own, self.num_islands, self.wishes.scale)
        return worker

    def _found_island(self) -> Island:
        """Meet the other members of this worker's island, by a file that its first member names."""
        assert self._line is not None
        first, place = self.global_rank - self.global_rank % self.island_size, self.global_rank % self.island_size
        path = tempfile.mkdtemp(prefix="island-") + "/store" if not place else None
        path = self._line.meet("the islands", path)[first]
        island = Island(path, place, self.island_size, self.root_device, self.timeout, self._line.stuck)
        self._line.meet("the islands, connected")
        if not place:
            shutil.rmtree(Path(path).parent)
        return island

    def _welcome(self) -> int:
        """Let new workers in, or be one; the epoch that begins. All go on from one clock."""
        assert self._line is not None and self._plan is not None
        trainer, rest = self._module.trainer, self._plan.not_held(self._module)
        state = None
        if self.global_rank == 0 and self.worker is not None:
            assert self._job is not None
            state = (replace(self._job, keys=None), self.worker.era + 1, state_of(trainer, rest))
        job, era, state = first_of(self._meet(JOIN, state), 0)
        if self._line.is_new:
            self._job = job if self._hosts is None else self._hosts.place(job, self._line.connection)
            load_state(trainer, state)
            worker = self._take_part(era)
            self._line.is_new = False
            worker.pull()
            self.worker = worker
        self._meet("the new workers' first read")
        return trainer.current_epoch

    def teardown(self) -> None:
        failed = self.failed
        if self.watch is not None and not failed:
            self._keep_weights()
            self._keep_optimizer()
            self.barrier("teardown")
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._read_shown(failed)
        try:
            if self.worker is not None:
                self.worker.close(failed)
        finally:
            self.worker, self.watch, self._line, self.rows, self.island = None, None, None, None, None
            if self._external is not None and failed:
                self._external.close()
                self._external = None
        ParallelStrategy.teardown(self)

    def _keep_optimizer(self) -> None:
        """Leave what servers have of the optimizer's state with rank 0's, for a checkpoint after the run."""
        if self.worker is not None:
            optimizer = self.worker.optimizer
            optimizer.load_state_dict(self.optimizer_state(optimizer))

    def _step_aside(self) -> None:
        if self.worker is not None:
            self.worker.pause()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's step, with the servers' in place of the optimizer's; a step that is skipped ticks too."""
        if self.worker is None or self._line is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._line.check()
        closure = self._averaging(closure)
        try:
            result = self.worker.step(
                lambda: ParallelStrategy.optimizer_step(self, optimizer, closure, model, **kwargs)
            )
        except LeaseLostError:
            self._line.check()  # the run may have failed, and the hub be gone
            raise
        if self.rows is not None:
            self.rows.after_step()
        return result

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Lightning's closure, after which gradients are the island's: before they are clipped, as under DDP."""
        island, worker = self.island, self.worker
        if island is None or worker is None:
            return closure

        def run() -> Any:
            value = closure()
            worker.announce()
            parameters = [parameter for group in worker.parameters for parameter in group]
            loss = island.average(parameters, value if isinstance(value, Tensor) else torch.zeros(()))
            return loss if isinstance(value, Tensor) else value

        return run

    def on_validation_start(self) -> None:
        if self.worker is not None:
            self.synchronize()

    def synchronize(self) -> None:
        """Give all workers the same weights, with everything in that any has pushed, and the same running statistics.

        Every worker calls it. Weights that a callback has put in the place of those which were read stay.
        """
        assert self.worker is not None
        self._meet("one version of the weights")
        if not self.worker.is_overwritten:
            self.worker.pull()
        buffers = running_statistics(self._module)
        everyone = self._meet("running statistics", {name: buffer.cpu() for name, buffer in buffers.items()})
        average_into(buffers, list(everyone.values()))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, of one version on every worker; every worker calls it."""
        if self.worker is not None:
            self.synchronize()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """One process's optimizer state, made of the servers'; every worker calls it, rank 0 gets it."""
        optimizer = unwrapped(optimizer)
        if self.worker is None or self._line is None or self._plan is None or not self._plan.has_optimizer_on_servers:
            return super().optimizer_state(optimizer)
        self._meet("the optimizer's state")
        copies = self._line.ask("copies") if self.global_rank == 0 else None
        self._meet("the optimizer's state, read")
        return optimizer.state_dict() if copies is None else optimizer_state(self._plan.table, copies, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write what Lightning dumped, and what every worker's filters left behind; every worker calls it."""
        if self.worker is not None and "optimizer_states" in checkpoint:
            filters = self.worker.session.client.filters
            own = None if filters is None else left_behind(filters, self.worker.table)
            if self.wishes.filters:
                checkpoint[KEY] = {"left_behind": [other for other in self.everyone(own) if other is not None]}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._left_behind = checkpoint.get(KEY, {}).get("left_behind", [])
        return checkpoint
