"""The states that FSDP2 divided: spoken of in pieces of one process's, gathered, loaded, and counted.

The one idea: a shard is some rows of a tensor, so it is a piece like any other engine's, and no checkpoint knows who
wrote it. Left out: steps (``engine.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.zero.accounting import StateBytes
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.expected_bytes import ModelStates, most_of_ranks, promise, state_sizes
from lightning_parallel.zero.fsdp2.sharding import Prefetch, Sharding
from lightning_parallel.zero.fsdp2.shards import cut_like, local_of, padded_numel, piece_of, wrap_like, write_whole
from lightning_parallel.zero.native.engine import MASTERS
from lightning_parallel.zero.native.partition import WORDS
from lightning_parallel.zero.optimizer.guarded_state import GuardedState
from lightning_parallel.zero.optimizer.state import Gather, host_copy, join_pieces, numbered_groups, refuse_groups
from lightning_parallel.zero.optimizer.state_shapes import refuse_states


@dataclass(frozen=True)
class ShardOptions:
    """How to shard.

    Args:
        stage: 3 frees a block's parameters after its forward, 2 after its backward.
        blocks: see `find_blocks`.
        compute: the dtype in which blocks compute; None is the parameters' own.
        master: make parameters 32 bits wide before they are sharded.
        offload: keep shards, gradients and optimizer states in the host's memory.
        keep_root: in stage 3 keep what lies outside of blocks from forward to backward, which needs it at once.
        prefetch: on GPUs, which blocks' gathers are asked for ahead: "none" beside what FSDP2 does by itself, those of
            the "forward", or "both" ways.
        whole_module: the module's steps are its forward; False shards its children as roots of their own, for steps
            that run backwards themselves.
    """

    stage: int = 3
    blocks: str | Sequence[str] = "auto"
    compute: torch.dtype | None = None
    master: bool = False
    offload: bool = False
    keep_root: bool = False
    prefetch: Prefetch = "forward"
    whole_module: bool = True


class ShardStates:
    """The model's and the optimizers' states, each rank with its shards.

    Args:
        module, mesh, options, control: see `ShardedEngine`.
    """

    _shardings: list[Sharding]

    def __init__(self, module: nn.Module, mesh: DeviceMesh, options: ShardOptions, control: Any) -> None:
        self.module, self.mesh, self.options, self.control = module, mesh, options, control
        names = mesh.mesh_dim_names or ()
        self.shards = mesh["shards"] if "shards" in names else mesh
        self._tells = "replicas" not in names or mesh["replicas"].get_local_rank() == 0  # others hold the same
        self.dtypes = {clean_name(name): p.dtype for name, p in module.named_parameters()}
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._checked: dict[int, int] = {}
        self._masters: dict[str, Any] = {}
        self._model: dict[str, dict[str, Any]] | None = None

    def model_state(self, module: nn.Module, gather: Gather) -> dict[str, Any]:
        """The whole model's state, in the dtypes it had, on the gathering rank; nothing elsewhere."""
        return self.whole(module.state_dict(), gather)

    def whole(self, state: Mapping[str, Any], gather: Gather) -> dict[str, Any]:
        """A state dict of the module or of a copy of it made whole on the gathering rank; empty elsewhere."""
        mine = {name: {"value": piece_of(v)} for name, v in state.items() if isinstance(v, DTensor)}
        parts = gather(mine if self._tells else {})
        if parts is None:
            return {}
        joined = join_pieces(parts)
        return {
            name: joined[name]["value"].to(self.dtypes.get(name)) if name in joined else host_copy(value)
            for name, value in state.items()
        }

    def model_pieces(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """This rank's pieces of the model's state, in 32 bits where the optimizer updates 32 bits."""
        if self._model is not None:
            return self._model
        if not self._tells:
            return {}
        ranks, rank = self.shards.size(), self.shards.get_local_rank()
        return {
            name: {"value": piece_of(value) if isinstance(value, DTensor) else host_copy(value)}
            for turn, (name, value) in enumerate(module.state_dict().items())
            if isinstance(value, DTensor) or turn % ranks == rank
        }

    def optimizer_pieces(self, optimizer: Optimizer) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """This rank's pieces of an optimizer's state, and its groups."""
        if id(optimizer) in self._saved:
            return self._saved[id(optimizer)]
        return own_pieces(optimizer) if self._tells else {}, numbered_groups(optimizer)

    def load_model_state(self, module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Take this rank's shards of a checkpoint's weights, or of the 32-bit copies if it has them."""
        masters = checkpoint.get(MASTERS, {}) if self.options.master else {}
        module.load_state_dict(write_whole(module, {**checkpoint["state_dict"], **masters}), strict=strict)

    def optimizer_state(self, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
        """The whole optimizer's state on the gathering rank, nothing elsewhere."""
        mine, groups = self.optimizer_pieces(optimizer)
        parts = gather(mine)
        return {} if parts is None else {"state": join_pieces(parts), "param_groups": groups}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole optimizer's state."""
        refuse_groups(optimizer, state)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        place = dict(zip(numbers, parameters, strict=True))
        cuts = {
            number: cut_state(place[number], fields) for number, fields in state["state"].items() if number in place
        }
        optimizer.load_state_dict({**state, "state": cuts})

    def extra_state(self, gather: Gather) -> dict[str, Any]:
        """What a checkpoint needs beside weights and optimizer states."""
        if not self.options.master:
            return {}
        parts = gather(self._masters or self._own_masters())
        if parts is None:
            return {}
        return {MASTERS: {name: fields["value"] for name, fields in join_pieces(parts).items()}}

    def _own_masters(self) -> dict[str, Any]:
        named = [(clean_name(name), parameter) for name, parameter in self.module.named_parameters()]
        wider = {name: p for name, p in named if isinstance(p, DTensor) and p.dtype != self.dtypes.get(name)}
        return {name: {"value": piece_of(p)} for name, p in wider.items()} if self._tells else {}

    def model_states(self, optimizers: Sequence[Optimizer]) -> ModelStates:
        """What the paper promises this rank in stage 3, and what shards of whole rows add; collective.

        Parameters are those of the optimizer: where it updates 32 bits there is no copy beside them. Moved are the
        bytes that blocks compute with. (Between steps FSDP2's stage 2 holds no more than its stage 3.)
        """
        for sharding in self._shardings:
            sharding.free()
        sharded = [p for p in self.module.parameters() if isinstance(p, DTensor)]
        trained = [p for p in sharded if p.requires_grad]
        size, ranks = trained[0].element_size(), self.shards.size()
        parameters, padded = sum(p.numel() for p in trained), sum(padded_numel(p) for p in trained)
        states = (
            (local_of(p), {k: local_of(v) if isinstance(v, Tensor) else v for k, v in o.state[p].items()})
            for o in optimizers for p in o.state
        )  # fmt: skip
        by_element, counters = state_sizes(states)
        [by_element] = most_of_ranks([by_element], self.control)
        moved = size if self.options.compute is None else torch.empty(0, dtype=self.options.compute).element_size()
        return promise(
            3, ranks, parameters, StateBytes(size, size, by_element), moved,
            held={"parameters": padded, "gradients": padded, "copy": 0}, copy_bytes=0,
            owned=sum(p.to_local().numel() for p in trained), counters=counters,
            frozen=sum(padded_numel(p) * p.element_size() for p in sharded if not p.requires_grad),
        )  # fmt: skip

    def keep_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Before the ranks part: what may be saved afterwards."""
        self._saved = {id(o): self.optimizer_pieces(o) for o in optimizers}
        self._masters = self._own_masters() if self.options.master else {}
        self._model = self.model_pieces(self.module)

    def check_states(self, optimizer: Optimizer) -> None:
        """After a step: are states kept element by element?

        Raises:
            ValueError: they are not.
        """
        count = sum(len(state) for state in optimizer.state.values())
        if self._checked.get(id(optimizer)) != count:
            self._checked[id(optimizer)] = count
            pairs = [(p, state) for p, state in optimizer.state.items() if isinstance(p, Tensor)]
            refuse_states(optimizer, pairs, 'ZeROStrategy(engine="fsdp2")')

    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take over 32-bit copies, by the names of their parameters."""
        named = self.module.named_parameters() if self.options.master else ()
        own = {clean_name(name): parameter for name, parameter in named}
        for name, value in masters.items():
            parameter = own.get(name)
            if isinstance(parameter, DTensor):
                parameter.detach().to_local().copy_(cut_like(parameter, value))


def own_pieces(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """This rank's part of an optimizer's state: by number of the parameter, by field."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        number: {field: _piece(value) for field, value in optimizer.state[parameter].items()}
        for number, parameter in enumerate(parameters)
        if optimizer.state.get(parameter)
    }


def give_whole(optimizer: Optimizer, whole: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """After a run: an optimizer has the module's parameters again. States of shards are left guarded; where this rank
    had all of a parameter its state is whole."""
    of: dict[Any, Any] = dict(whole)
    for group in optimizer.param_groups:
        group["params"] = [of.get(p, p) for p in group["params"]]
    held = {of.get(p, p): {k: _local(v) for k, v in state.items()} for p, state in optimizer.state.items()}
    is_whole = all(p.to_local().numel() == p.numel() for p in whole if isinstance(p, DTensor))
    words = WORDS.format(name=type(optimizer).__name__)
    left: Any = defaultdict(dict, held) if is_whole else GuardedState(held, words)
    optimizer.state = left


def _local(value: Any) -> Any:
    return local_of(value).detach() if isinstance(value, DTensor) else value


def _piece(value: Any) -> Any:
    if isinstance(value, DTensor):
        return piece_of(value)
    return host_copy(value)


def cut_state(parameter: Tensor, fields: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of an optimizer's state of a whole parameter."""
    if not isinstance(parameter, DTensor):
        return dict(fields)
    return {
        name: wrap_like(parameter, cut_like(parameter, value).clone())
        if isinstance(value, Tensor) and name != "step" and value.shape == parameter.shape
        else value
        for name, value in fields.items()
    }
