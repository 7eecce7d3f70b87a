"""`ParameterServerStrategy`: weights and optimizer on servers, workers that wait for each other as little as wanted.

The one idea: no default process group, since with one Lightning waits for rank 0 before every batch. A worker meets the
others at the hub (`MeetingStrategy`) where an epoch, an evaluation or a checkpoint needs all, and in steps talks to
servers alone (`ServerWorker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_parallel.parameter_server.consistency import Consistency, Sandblaster
from lightning_parallel.parameter_server.consistency_names import rule_of
from lightning_parallel.parameter_server.filters import Precision, Selector
from lightning_parallel.parameter_server.trainer.server_plan import Wishes
from lightning_parallel.parameter_server.transport.pyzmq import refuse_missing
from lightning_parallel.parameter_server.updates import Update
from lightning_parallel.strategies.arguments import all_are, is_count, is_positive, refuse_arguments
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.server_states import ServerStates

_FILTER_WORDS = (
    "a list of selectors and number formats of lightning_parallel.parameter_server.filters, such as [TopK(0.1)]"
)


class ParameterServerStrategy(ServerStates):
    """Data parallelism through parameter servers, synchronous or as stale as wanted.

    Every worker trains on its own rows, pushes its gradients to the servers and reads weights back. The servers make
    the steps of the module's own optimizer (SGD, Adagrad, Adam, AdamW, with any groups); a push is divided by the
    number of workers, so that any number has the learning rate of one. With "bsp" a step is DistributedDataParallel's.

    Args:
        consistency: "bsp": a step is all workers' together. "ssp": at a read no worker is more than ``staleness`` steps
            ahead of the slowest; "essp": the same, and servers send weights unasked; "bounded_delay": the same, and a
            read does not wait for the worker's own pushes. "async" and "downpour": nobody waits. "sandblaster": servers
            make the steps of `torch.optim.LBFGS`, of all workers' rows. Or a rule of
            `lightning_parallel.parameter_server.consistency`.
        staleness: see `lightning_parallel.parameter_server.consistency_names.rule_of`.
        num_servers: server processes; of several hosts, server i is on host i mod ``server_nodes``.
        replication: servers that hold a piece of the weights, on different hosts as long as there are any; one less may
            die at a time.
        update: "server"; "worker": each worker runs the optimizer itself, whichever it is, and servers add what it
            changed, divided by the number of workers; or an update of `lightning_parallel.parameter_server.updates`,
            with its own learning rate.
        filters: what pushes go through: selectors and at most one number format of
            `lightning_parallel.parameter_server.filters`.
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
        Ho et al., NIPS 2013 (SSP); Dean et al., NIPS 2012 (Downpour, Sandblaster); Li et al., OSDI 2014 (servers,
        bounded delay).
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
        super().__init__(start_method=start_method, **kwargs)
        counts = {"num_servers": num_servers, "replication": replication, "n_push": n_push, "n_fetch": n_fetch}
        right = isinstance(update, Update) or update in ("server", "worker")
        refuse_arguments(
            self,
            staleness=(staleness, staleness is None or is_count(staleness, 0), "a count, 0 or more"),
            update=(update, right, '"server", "worker" or an update of lightning_parallel.parameter_server.updates'),
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
        if isinstance(rule, Sandblaster) and (restarts or island_size > 1):
            raise ValueError(
                f'{type(self).__name__}(consistency="sandblaster", restarts={restarts}, island_size={island_size}):'
                " portions of a step are given to single workers that are there from the start. Use restarts=0 and"
                " island_size=1."
            )
        refuse_missing()
        self.restarts, self.island_size, self.server_nodes = restarts, island_size, server_nodes

    def _configure_launcher(self) -> None:
        from lightning_parallel.parameter_server.trainer.coordination.past_runs import RunsLauncher
        from lightning_parallel.parameter_server.trainer.coordination.worker_launcher import WorkerLauncher

        environment = self.cluster_environment
        externally = environment is not None and environment.creates_processes_externally
        if self.start_method == "popen" or externally:
            if self.restarts and not externally:
                raise ValueError(
                    f"{type(self).__name__}(restarts={self.restarts}) starts workers again, but here others start them."
                    ' Use start_method="fork" or "spawn", or restarts=0.'
                )
            self._launcher: RunsLauncher | WorkerLauncher = RunsLauncher(self)
        else:
            self._launcher = WorkerLauncher(self, self.start_method, self.restarts, self.island_size)
