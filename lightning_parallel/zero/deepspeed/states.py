"""Where DeepSpeed keeps a parameter's states: this rank's fragment of each, in one way of speaking for all stages.

The one idea: in every stage DeepSpeed keeps flat vectors, mostly of 32 bits, and a parameter's elements that this rank
owns lie in one of them, in one run. So a fragment is (vector, offset in it, first element, number of elements). In a
step it is a parameter of the user's optimizer, which keeps a state for it: one without a gradient is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.native.partition import is_by_element
from lightning_parallel.zero.optimizer.state import Piece, host_copy


@dataclass(frozen=True)
class Fragment:
    """This rank's elements of one parameter.

    Args:
        flat: the vector that the optimizer updates.
        offset: where in it they begin.
        begin: the first of them, in the flattened parameter.
        numel: how many there are.
        shape: of the whole parameter.
    """

    flat: Tensor
    offset: int
    begin: int
    numel: int
    shape: torch.Size

    @cached_property
    def segment(self) -> nn.Parameter:
        """The elements as a parameter of the optimizer, 1-D, in the vector's memory."""
        return nn.Parameter(self.of(self.flat))

    def of(self, vector: Tensor) -> Tensor:
        """The elements in a vector of the same layout."""
        return vector.detach()[self.offset : self.offset + self.numel]

    def piece(self, vector: Tensor) -> Piece:
        """They as a piece of the whole, on the host."""
        return Piece(self.begin, self.of(vector).cpu().clone(), self.shape)

    def write(self, vector: Tensor, whole: Tensor) -> None:
        """Take them from a whole tensor."""
        self.of(vector).copy_(whole.flatten()[self.begin : self.begin + self.numel])


def find_fragments(optimizer: Any, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Fragment]:
    """The fragments that this rank owns.

    Args:
        optimizer: DeepSpeed's, of any stage.
        parameters: that train.
    """
    find = _of_whole if hasattr(optimizer, "single_partition_of_fp32_groups") else _of_sharded
    found = ((parameter, find(optimizer, parameter)) for parameter in parameters)
    return {parameter: fragment for parameter, fragment in found if fragment is not None}


def flat_vectors(optimizer: Any) -> list[Tensor]:
    """All vectors that this rank's optimizer updates."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return list(optimizer.single_partition_of_fp32_groups)
    return list(optimizer.fp32_partitioned_groups_flat)


def _of_whole(optimizer: Any, parameter: nn.Parameter) -> Fragment | None:
    """Stages 1 and 2: the parameter is whole, and a part of it may lie in this rank's vector."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Fragment(flat, own.start, whole.start, own.numel, parameter.shape)


def _of_sharded(optimizer: Any, parameter: nn.Parameter) -> Fragment | None:
    """Stage 3: every rank has as many elements; the last ones may be padding."""
    number, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
    begin = part * optimizer._get_param_partition_rank(parameter)
    numel = min(part, parameter.ds_numel - begin)  # type: ignore[attr-defined]
    if numel <= 0:
        return None
    flat = optimizer.fp32_partitioned_groups_flat[number]
    return Fragment(flat, offset, begin, numel, parameter.ds_shape)  # type: ignore[attr-defined]


def sharded_piece(parameter: Any, rank: int) -> Piece | None:
    """Stage 3: this rank's elements of a parameter in its own dtype, which need not train."""
    part = parameter.ds_tensor.ds_numel
    begin = part * rank
    numel = min(part, parameter.ds_numel - begin)
    if numel <= 0:
        return None
    return Piece(begin, parameter.ds_tensor.detach()[:numel].cpu().clone(), parameter.ds_shape)


def load_divided(
    module: nn.Module, state: Mapping[str, Tensor], fragments: Mapping[nn.Parameter, Fragment], rank: int, strict: bool
) -> None:
    """Stage 3: take this rank's elements of weights, and of the vectors that the optimizer updates.

    Raises:
        RuntimeError: names or shapes are others than the module's; names only if `strict`.
    """
    own: dict[str, Any] = {clean_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    rest = {name: value for name, value in state.items() if name not in own}
    wrong = module.load_state_dict(rest, strict=False)
    missing = [name for name in {*wrong.missing_keys, *own} if clean_name(name) not in state]
    problems = [f"Missing key(s): {sorted(missing)}." if missing and strict else ""]
    problems += [f"Unexpected key(s): {wrong.unexpected_keys}." if wrong.unexpected_keys and strict else ""]
    there = {name: parameter for name, parameter in own.items() if name in state}
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, the module's has {tuple(p.ds_shape)}."
        for name, p in there.items()
        if state[name].shape != p.ds_shape
    ]
    if any(problems):
        text = " ".join(filter(None, problems))
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {text}")
    for parameter, value in {p: state[name] for name, p in there.items()}.items():
        _load_part(parameter, value, fragments.get(parameter), rank)


@torch.no_grad()
def _load_part(parameter: Any, value: Tensor, fragment: Fragment | None, rank: int) -> None:
    """One parameter; small ones are held whole beside this rank's elements."""
    if parameter.data.shape == parameter.ds_shape:
        value = value.detach().clone()  # read once
        parameter.data.copy_(value)
    part = parameter.ds_tensor.ds_numel
    begin = part * rank
    numel = min(part, parameter.ds_numel - begin)
    if numel > 0:
        own = value.flatten()[begin : begin + numel]
        parameter.ds_tensor.data[:numel].copy_(own)
        if fragment is not None:
            fragment.of(fragment.flat).copy_(own)


def pieces_of(optimizer: Optimizer, numbered: Mapping[int, Fragment]) -> dict[int, dict[str, Any]]:
    """This rank's part of an optimizer's state: by number of the parameter, by field."""
    return {
        number: {name: _piece(name, value, fragment) for name, value in optimizer.state[fragment.segment].items()}
        for number, fragment in numbered.items()
        if optimizer.state.get(fragment.segment)
    }


def cut_state(fields: Mapping[str, Any], fragment: Fragment) -> dict[str, Any]:
    """This rank's part of one parameter's state in one process."""
    end = fragment.begin + fragment.numel
    return {
        name: value.flatten()[fragment.begin : end].clone() if is_by_element(name, value, fragment.shape) else value
        for name, value in fields.items()
    }


def whole_state(fields: Mapping[str, Any], fragment: Fragment) -> dict[str, Any]:
    """The state of one parameter, of which this rank has all elements."""
    return {
        name: value.view(fragment.shape) if is_by_element(name, value, fragment.segment.shape) else value
        for name, value in fields.items()
    }


def _piece(name: str, value: Any, fragment: Fragment) -> Any:
    if is_by_element(name, value, fragment.segment.shape):
        return Piece(fragment.begin, value.detach().cpu().clone(), fragment.shape)
    return host_copy(value)
