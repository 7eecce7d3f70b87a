"""The named mesh of a run: which global ranks form which axis, and one process-wide store to build groups on.

The one idea: every strategy names its axes ("pipeline", later "data", "tensor") and asks for groups by axis, so that
composing axes changes sizes and nothing else.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_Address: TypeAlias = tuple[
    int, str, int
]  # process, host and port: what a process forked from this one has is not its own
# Every direction of every pipeline boundary has a communicator of its own, so nothing waits behind anything there.
_EAGER_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_set_here: list[str] = []  # variables of the environment that are set for a run
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_stores: dict[_Address, Any] = {}
_runs: dict[_Address, int] = {}


def build_mesh(device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
    """A mesh over all ranks with the given axes, outermost first.

    Raises:
        ValueError: the sizes do not multiply to the number of processes.
    """
    world = dist.get_world_size()
    if math.prod(axes.values()) != world or min(axes.values()) < 1:
        sizes = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise ValueError(
            f"The mesh {sizes} has {math.prod(axes.values())} ranks, but {world} processes were started. Make the sizes"
            " multiply to Trainer(devices=..., num_nodes=...)."
        )
    with unbound_from_device():
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


@contextmanager
def unbound_from_device() -> Iterator[None]:
    """Groups opened inside are new ones.

    Of a default group that is bound to a device, a mesh of several axes splits off its groups. A group of gloo beside
    NCCL does not survive that (torch 2.11: a segmentation fault).
    """
    group = dist.group.WORLD
    device = getattr(group, "bound_device_id", None)
    if group is None or device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def grid(axes: Mapping[str, int], order: Sequence[str]) -> Tensor:
    """The global ranks of a mesh as a tensor int64 with a dimension for each axis of `order`, which names all of them.

    Example:
        >>> grid({"data": 2, "pipeline": 2}, ("pipeline", "tensor", "data")).tolist()
        [[[0, 2]], [[1, 3]]]
    """
    ranks, names = torch.arange(math.prod(axes.values())).view(*axes.values()), list(axes)
    return ranks.permute([names.index(axis) for axis in order if axis in axes]).reshape([axes.get(a, 1) for a in order])


def axes_between(axes: Mapping[str, int], ranks: Sequence[int]) -> str:
    """The axes of a mesh along which some of its global ranks lie apart, outermost first, joined by an x.

    Example:
        >>> axes_between({"data": 2, "pipeline": 2}, [0, 1]), axes_between({"data": 2, "pipeline": 2}, [0, 3])
        ('pipeline', 'dataxpipeline')
    """
    places = torch.unravel_index(torch.tensor([*ranks]), tuple(axes.values()))
    return "x".join(axis for axis, place in zip(axes, places, strict=True) if place.unique().numel() > 1)


def open_groups(axes: Mapping[str, int], planes: Sequence[Collection[str]] = ()) -> dict[frozenset[str], Any]:
    """The group of this rank's line along each axis, and of its plane along several; all ranks call it.

    There is none for one rank, nor for all of them. The mesh's own groups may serve the device alone; these serve the
    host too, as the default group does.
    """
    wide = [axis for axis, size in axes.items() if size > 1]
    wanted = {frozenset({axis}): None for axis in wide} | {frozenset(plane) & set(wide): None for plane in planes}
    groups: dict[frozenset[str], Any] = {}
    for plane in wanted:
        inner = [axis for axis in axes if axis in plane]
        size = math.prod(axes[axis] for axis in inner)
        if 1 < size < math.prod(axes.values()):
            outer = [axis for axis in axes if axis not in plane]
            for line in grid(axes, outer + inner).reshape(-1, size).tolist():
                group = dist.new_group(line)
                if dist.get_rank() in line:
                    groups[plane] = group
    return groups


def open_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of one run. Behind it is one connection for the life of the process, in which every run has its own
    keys, so that `fit` and then `validate` in one process never race for a port."""
    address = (os.getpid(), host, port)
    if address not in _stores:
        with _environment(MASTER_ADDR=host, MASTER_PORT=str(port)):
            _stores[address] = _rendezvous(host, port, rank, world_size, timeout)
    _runs[address] = _runs.get(address, 0) + 1
    return dist.PrefixStore(f"lightning_parallel/run_{_runs[address]}", _stores[address])


def _rendezvous(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Torch's store, which listens where this host alone reaches it, if all ranks are here: by itself it listens
    everywhere. (Torchrun's agent has a store already, and ours is a part of it.)"""
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if rank or served_by_agent or host not in _LOOPBACK:
        return next(iter(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout)))[0]
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    with listener:
        return dist.TCPStore(
            host, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=os.dup(listener.fileno())
        )


def has_store(port: int) -> bool:
    """Whether this process has the store of its runs at that port."""
    return any((process, at) == (os.getpid(), port) for process, _, at in _stores)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Variables of the environment, put back afterwards: a later launcher reads them as the user's."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def connect(store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Open the default process group: gloo for host tensors, NCCL beside it on CUDA."""
    if device.type == "cuda" and _EAGER_WARNING not in os.environ:
        os.environ[_EAGER_WARNING] = "false"
        _set_here.append(_EAGER_WARNING)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **options)


def disconnect(failed: bool = False) -> None:
    """Close every process group of this process; after a failure without waiting for what is still on its way.

    NCCL communicators are aborted: all work is done by then, and an orderly end would wait for groups that others
    opened.
    """
    while _set_here:
        os.environ.pop(_set_here.pop(), None)
    if not (dist.is_available() and dist.is_initialized()):
        return
    if "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
        return
    if not failed:
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
    dist.distributed_c10d._abort_process_group()
