"""Shards as FSDP2 makes them: which modules are sharded apart, and what a shard is of a whole tensor.

The one idea: a rank's shard is rows of the whole, and so a piece of the flattened whole, which checkpoints speak of.
What lies outside of blocks belongs to the root. Left out: shards by other dimensions than the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.zero.optimizer.state import Piece

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(module: nn.Module, blocks: str | Sequence[str] = "auto") -> list[nn.Module]:
    """The modules that are sharded apart: those in the outermost lists of modules, or those that are named.

    A block that shares a parameter with something outside of it is left to the root.

    Args:
        module: the whole.
        blocks: "auto", the name of a container whose children are meant, or names of blocks.

    Raises:
        ValueError: there is no module of such a name.

    Example:
        >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        >>> [type(block).__name__ for block in find_blocks(layers)]
        ['Linear', 'Linear']
    """
    if blocks == "auto":
        found = list(_in_containers(module))
    elif isinstance(blocks, str):
        found = list(_named(module, blocks).children())
    else:
        found = [_named(module, name) for name in blocks]
    return [block for block in called(found) if _has_parameters(block) and not _shares(module, block)]


def called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules, and in place of those that have no forward (`ModuleList`, `ModuleDict`) what they hold.

    Example:
        >>> [type(m).__name__ for m in called([nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]), nn.ReLU()])]
        ['Linear', 'Tanh', 'ReLU']
    """
    for module in modules:
        if type(module).forward is nn.Module.forward:
            yield from called(module.children())
        else:
            yield module


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; another tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def piece_of(tensor: DTensor, values: Tensor | None = None) -> Piece:
    """This rank's shard as a piece of the flattened whole, on the host.

    Args:
        tensor: sharded by its first dimension.
        values: other values of the same shard, such as optimizer state; default the tensor's own.
    """
    local = (tensor if values is None else values).detach()
    return Piece(_begin(tensor)[0], local_of(local).detach().cpu().clone().flatten(), tensor.shape)


def cut_like(tensor: DTensor, whole: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, in the dtype of `whole`."""
    begin, end = _begin(tensor)
    return whole.flatten()[begin:end].view(tensor.to_local().shape)


def wrap_like(tensor: DTensor, local: Tensor) -> DTensor:
    """A sharded tensor of the same layout with this local part."""
    local = local.to(tensor.to_local().device)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def padded_numel(tensor: DTensor) -> int:
    """Elements of every rank's shard in memory, where shorter ones are padded to the longest."""
    mesh = tensor.device_mesh
    dim = next(i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard))
    return -(-tensor.shape[0] // mesh.size(dim)) * (tensor.numel() // max(1, tensor.shape[0]))


def write_whole(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state dict with this rank's shards in place of what the module has sharded."""
    own = dict(module.state_dict(keep_vars=True))
    return {
        name: wrap_like(own[name], cut_like(own[name], value).clone())
        if isinstance(own.get(name), DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }


def _begin(tensor: DTensor) -> tuple[int, int]:
    """From which to which element of the flattened whole this rank's rows reach."""
    mesh: DeviceMesh = tensor.device_mesh
    dim = next(i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard))
    rows, per_row = tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])
    chunk = -(-rows // mesh.size(dim))
    first = min(mesh.get_local_rank(dim) * chunk, rows)
    return first * per_row, min(first + chunk, rows) * per_row


def _in_containers(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, _CONTAINERS):
        yield from module.children()
        return
    for child in module.children():
        yield from _in_containers(child)


def _named(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"blocks names {name!r}, which the module does not have; it has {known}, ...") from error


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shares(module: nn.Module, block: nn.Module) -> bool:
    """Whether a parameter of the block is used outside of it too."""
    inside = {id(m) for m in block.modules()}
    own = {id(p) for p in block.parameters()}
    others = (p for m in module.modules() if id(m) not in inside for p in m._parameters.values() if p is not None)
    return any(id(p) in own for p in others)


def groups_of(part: Any) -> list[Any]:
    """FSDP2's groups of the parameters that one module gathers."""
    state = part._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # PyTorch 2.13; one or none before
    return list(several) if several is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def keep_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Make floating-point parameters of one dtype, buffers left alone."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
