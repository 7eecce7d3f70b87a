"""`MeshStrategy`: what all strategies of this library share, whatever they parallelise.

The one idea: ranks form a named mesh. Launching, ranks, sampler, reductions and failures are told here once, by axis:
what Lightning means by "all processes that see different rows" is the data axis, what it means by "all processes" the mesh.
Left out: anything a model's parameters or steps undergo; that is the subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel.mesh import build_mesh, connect, disconnect

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.pytorch.strategies.strategy import TBroadcast

StartMethod = Literal["popen", "fork", "spawn"]


class MeshStrategy(ParallelStrategy):
    """A strategy whose ranks form a named mesh.

    Args:
        start_method: how `Trainer` starts the other ranks of this host: "popen" runs the script again (the default),
            "fork" works in notebooks, "spawn" in scripts without side effects. Under torchrun or SLURM none is used.
        timeout: how long a collective may take before it fails.
        failure_patience: seconds after which a rank without a sign of life is declared lost.
    """

    def __init__(
        self, start_method: StartMethod = "popen", timeout: timedelta = timedelta(minutes=30), failure_patience: float = 20.0,
        parallel_devices: list[torch.device] | None = None, cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None, precision_plugin: Precision | None = None,
    ) -> None:  # fmt: skip
        if start_method not in ("popen", "fork", "spawn"):
            raise ValueError(f'start_method={start_method!r}: use "popen" (scripts), "fork" (notebooks) or "spawn".')
        super().__init__(
            parallel_devices=parallel_devices, cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )  # fmt: skip
        self.start_method, self.timeout, self.failure_patience = start_method, timeout, failure_patience
        self.num_nodes = 1
        self._mesh: DeviceMesh | None = None
        self._failed = False

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall give loaders a `DistributedSampler`: only where ranks see different rows."""
        return self._mesh is not None and self.axis_size("data") > 1

    def axes(self) -> Mapping[str, int]:
        """Names and sizes of the mesh's axes, outermost first; their product is the number of processes."""
        raise NotImplementedError

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; it exists once the processes are connected."""
        if self._mesh is None:
            raise RuntimeError("The mesh exists from the start of fit, validate, test or predict on, not before.")
        return self._mesh

    def axis_size(self, axis: str) -> int:
        """Number of ranks along an axis, 1 for an axis this mesh does not have."""
        return self.mesh[axis].size() if axis in (self.mesh.mesh_dim_names or ()) else 1

    def axis_rank(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.mesh[axis].get_local_rank() if axis in (self.mesh.mesh_dim_names or ()) else 0

    # -- ranks and devices ---------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.axis_size("data"), "rank": self.axis_rank("data")}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero decorators who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        alone = self.num_processes * self.num_nodes == 1
        if not alone and not self.cluster_environment.creates_processes_externally:
            from lightning_parallel.trainer.launchers import make_launcher

            self._launcher = make_launcher(self)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        if not dist.is_initialized():
            connect(
                environment.main_address, environment.main_port, self.global_rank, self.world_size, self.root_device,
                self.timeout,
            )  # fmt: skip
        self._mesh = build_mesh(self.root_device.type, self.axes())

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        self._mesh = None
        disconnect(self._failed)
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()

    # -- collectives, by what Lightning means by them ---------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the mesh, on the host."""
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Give every rank of the mesh the object of rank `src`."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, device=torch.device("cpu"))
        return box[0]

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce over ranks that saw different rows: the data axis. Ranks of one model copy hold the same value already."""
        if group is None and self.axis_size("data") == 1:
            return tensor
        group = self.mesh["data"].get_group() if group is None else group
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axis; a single model copy gives its tensor back, as one process does."""
        if group is None and self.axis_size("data") == 1:
            return tensor
        return super().all_gather(tensor, self.mesh["data"].get_group() if group is None else group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) ranks of the mesh say yes, agreed on the host."""
        if not dist.is_initialized():
            return decision
        vote = torch.tensor(int(decision))
        dist.all_reduce(vote, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote)

    def setup(self, trainer: Trainer) -> None:
        raise NotImplementedError
