"""The axes along which a strategy's ranks lie.

The one idea: a subclass names the axes and their sizes; who this rank is along each, and with whom it talks there,
follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel.mesh import axes_between
from lightning_parallel.strategies.collectives import MeshCollectives


class MeshAxes(MeshCollectives):
    """The part of a strategy that knows the mesh.

    Args:
        **kwargs: see Lightning's `ParallelStrategy`.
    """

    planes: Sequence[tuple[str, ...]] = ()  # sets of axes whose ranks talk together, beside each axis

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._mesh: DeviceMesh | None = None
        self._groups: dict[frozenset[str], Any] = {}

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall give loaders a `DistributedSampler`: only where ranks see different rows."""
        return self._mesh is not None and self.axis_size("data") > 1

    def axes(self) -> Mapping[str, int]:
        """Names and sizes of the mesh's axes, outermost first; their product is the number of processes."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        return self._mesh is not None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; it exists once the processes are connected."""
        if self._mesh is None:
            raise RuntimeError("The mesh exists from the start of fit, validate, test or predict on, not before.")
        return self._mesh

    def axis_size(self, axis: str) -> int:
        """Number of ranks along an axis, 1 for an axis this mesh does not have."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(axis)) if axis in names else 1

    def axis_rank(self, axis: str) -> int:
        """This rank's place along an axis, known after a failure too, when the groups are gone."""
        names, coordinate = self.mesh.mesh_dim_names or (), self.mesh.get_coordinate()
        return coordinate[names.index(axis)] if coordinate is not None and axis in names else 0

    def group(self, *axes: str) -> Any:
        """The process group of this rank's line along an axis, or of its plane along several that `planes` names, on
        host and device; None is the default group."""
        return self._groups.get(frozenset(axis for axis in axes if self.axes().get(axis, 1) > 1))

    def axis_of(self, group: Any) -> str:
        """The axis along which the ranks of a process group lie, for callbacks, or several joined by an x; "host" where
        they agree on the host alone."""
        if id(group) in self._host_groups():
            return "host"
        return axes_between(self.axes(), dist.get_process_group_ranks(group))

    def _host_groups(self) -> Collection[int]:
        """Identities of the groups in which nothing of the model is said."""
        return {id(self._barriers)}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.axis_size("data"), "rank": self.axis_rank("data")}
