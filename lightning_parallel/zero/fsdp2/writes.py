"""What hooks write to parameters that FSDP2 shards goes into the shards, however they write it.

In-place operators on a `DTensor` do so by themselves. `w.data = values` leaves the shard as it was without a word, a
state dict of whole tensors is refused, and what is written to a gathered parameter between a forward and its backward
is freed behind it. Here the first two write to the shard, and the last is taken over before the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parallel.zero.fsdp2.shards import cut_like, groups_of, wrap_like

_data: Any = torch._C.TensorBase.data


class ShardedData:
    """Lets `w.data = ...` write to shards until `remove` is called.

    Args:
        parameters: sharded ones.
    """

    _running: ClassVar[list[ShardedData]] = []

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = {id(p): p for p in parameters}  # `nn.Module.to` swaps no tensor that has a weak reference
        if not self._running:
            DTensor.data = property(_data.__get__, _set)  # type: ignore[assignment]
        self._running.append(self)

    def remove(self) -> None:
        """The last one to go leaves `DTensor` as PyTorch has it."""
        if self in self._running:
            self._running.remove(self)
            if not self._running:
                del DTensor.data

    @classmethod
    def knows(cls, tensor: Any) -> bool:
        """Whether a tensor is a parameter of one that is there."""
        return any(id(tensor) in data._parameters for data in cls._running)


def _set(parameter: Any, values: Tensor) -> None:
    if ShardedData.knows(parameter):
        write(parameter, values)
    else:
        _data.__set__(parameter, values)


@torch.no_grad()
def write(parameter: Any, values: Tensor) -> None:
    """Give a sharded parameter the values of a whole tensor, or of one that is sharded.

    Raises:
        ValueError: it has another shape.
    """
    if values.shape != parameter.shape:
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} was given data of shape {tuple(values.shape)}, while ZeRO"
            " divides it. Keep its shape, or change it before fit."
        )
    if isinstance(values, DTensor):
        values = values.redistribute(parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(values.to_local())
    else:
        parameter.to_local().copy_(cut_like(parameter, values))


def cut_loaded(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict`: whole tensors become this rank's shards."""
    for name, parameter in module._parameters.items():
        whole = state.get(prefix + name)
        is_whole = isinstance(whole, Tensor) and not isinstance(whole, DTensor)
        if is_whole and isinstance(parameter, DTensor) and whole.shape == parameter.shape:
            state[prefix + name] = wrap_like(parameter, cut_like(parameter, whole).clone())


@torch.no_grad()
def take_over_gathered(parts: Sequence[FSDPModule]) -> None:
    """Shards take over what was written to parameters that are gathered at the moment."""
    for part in parts:
        for group in groups_of(part):
            for held in group.fsdp_params:
                if held.sharded_state.name == "UNSHARDED":
                    _take_over(held.sharded_param, held._unsharded_param)
                    _put_back(held)


def _put_back(held: Any) -> None:
    """A gathered parameter that was given other memory has its own again, with what the forward read: the backward
    reads it, and then it is freed."""
    gathered, outputs = held._unsharded_param, held.all_gather_outputs
    if len(outputs) == 1 and gathered.untyped_storage().data_ptr() != outputs[0].untyped_storage().data_ptr():
        size = torch.Size(held._orig_size)
        gathered.data = outputs[0].as_strided(size, held._contiguous_orig_stride, 0)


def _take_over(sharded: Any, gathered: Tensor) -> None:
    own = sharded.to_local()
    if gathered.shape != sharded.shape:
        raise ValueError(
            f"A parameter of shape {tuple(sharded.shape)} was made one of {tuple(gathered.shape)} in training, while"
            " ZeRO divides it. Keep its shape, or change it before fit."
        )
    seen = cut_like(sharded, gathered.detach())
    own.copy_(torch.where(seen.to(own.device) == own.to(seen.dtype), own, seen.to(own)))
