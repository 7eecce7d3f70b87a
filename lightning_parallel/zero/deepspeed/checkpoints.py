"""The states that DeepSpeed divided: spoken of in pieces of one process's, gathered, loaded, and counted.

The one idea: where an element lies in DeepSpeed's vectors is found once (``states.py``); from there on a
checkpoint of this engine is made as every other engine's is, and no checkpoint knows who wrote it. Left out: steps
(``zero/deepspeed/engine.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.zero.accounting import StateBytes
from lightning_parallel.zero.compiled_names import clean_name
from lightning_parallel.zero.deepspeed.setup import DeepSpeedOptions
from lightning_parallel.zero.deepspeed.states import (
    Fragment,
    cut_state,
    find_fragments,
    flat_vectors,
    load_divided,
    pieces_of,
    sharded_piece,
)
from lightning_parallel.zero.deepspeed.veil import behind_veil
from lightning_parallel.zero.expected_bytes import ModelStates, most_of_ranks, promise, state_sizes
from lightning_parallel.zero.native.engine import MASTERS
from lightning_parallel.zero.optimizer.state import Gather, host_copy, join_pieces
from lightning_parallel.zero.ranks import Ranks

Groups = list[list[nn.Parameter]]


class DividedStates:
    """The model's and the optimizer's states, each rank with its part.

    Args:
        module: the model.
        optimizer: the one that trains it, None where nothing trains.
        options: what DeepSpeed was asked for.
        control: a group for host tensors of all ranks.
        ranks: among whom states are divided, and who holds the same parts elsewhere.
    """

    deepspeed: Any  # its engine, once it has divided them

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, options: DeepSpeedOptions, control: Any, ranks: Ranks
    ) -> None:
        self.module, self.optimizer, self.options, self.control = module, optimizer, options, control
        self.groups: Groups = [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        self._released = False
        self.ranks, self._tells = ranks, not ranks.replica  # other replicas hold the same
        self._saved: tuple[Any, Any] | None = None
        self._masters: dict[str, Any] = {}
        self._model: dict[str, dict[str, Any]] | None = None

    @property
    def inner(self) -> Any:
        """DeepSpeed's optimizer."""
        return self.deepspeed.optimizer

    @cached_property
    def fragments(self) -> dict[nn.Parameter, Fragment]:
        """This rank's elements of every parameter that trains."""
        trained = [p for group in self.groups for p in group if p.requires_grad]
        return find_fragments(self.inner, trained)

    @contextmanager
    def segments(self, used: Collection[nn.Parameter] | None = None) -> Iterator[None]:
        """The optimizer's groups hold this rank's fragments, of parameters that are used; afterwards what they held."""
        assert self.optimizer is not None
        held = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, self.groups, strict=True):
            there = [p for p in params if p in self.fragments and (used is None or p in used)]
            group["params"] = [self.fragments[p].segment for p in there]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, held, strict=True):
                group["params"] = params

    @behind_veil
    def model_state(self, module: nn.Module, gather: Gather) -> dict[str, Any]:
        """The whole model's state on the gathering rank; elsewhere nothing (stage 3) or the same."""
        state = module.state_dict()
        if self.options.stage < 3 or self._released:
            return {name: host_copy(value) for name, value in state.items()}
        parts = gather(self._sharded_pieces() if self._tells else {})
        if parts is None:
            return {}
        joined = join_pieces(parts)
        return {name: joined[name]["value"] if name in joined else host_copy(v) for name, v in state.items()}

    def _sharded_pieces(self) -> dict[str, dict[str, Any]]:
        """Stage 3: this rank's part of every parameter, by all of its names."""
        rank, named = self.ranks.rank, self.module.named_parameters(remove_duplicate=False)
        found = {clean_name(name): sharded_piece(parameter, rank) for name, parameter in named}
        return {name: {"value": piece} for name, piece in found.items() if piece is not None}

    @behind_veil
    def model_pieces(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """This rank's pieces of the model's state, in 32 bits where the optimizer updates 32 bits."""
        if self._model is not None:
            return self._model
        if not self._tells:
            return {}
        ranks, rank = self.ranks.size, self.ranks.rank
        masters = self._own_masters()
        trained = {p for group in self.groups for p in group if p.requires_grad}
        copied = {clean_name(n) for n, p in module.named_parameters() if p in trained} if self._has_masters else set()
        sharded = self._sharded_pieces() if self.options.stage == 3 else {}
        names = [clean_name(n) for n, _ in module.named_parameters(remove_duplicate=False)] if sharded else []
        own = {
            name: {"value": host_copy(value)}
            for turn, (name, value) in enumerate(module.state_dict().items())
            if name not in copied and name not in names and turn % ranks == rank
        }
        rest = {name: fields for name, fields in sharded.items() if name not in copied}
        return own | rest | {name: {"value": fields["master"]} for name, fields in masters.items()}

    @property
    def _has_masters(self) -> bool:
        return self.options.dtype != self.options.updated and self.optimizer is not None

    def _own_masters(self) -> dict[str, dict[str, Any]]:
        """This rank's part of the 32-bit copies of parameters, by the parameters' names."""
        if not (self._has_masters and self._tells):
            return {}
        names, fragments = {p: clean_name(n) for n, p in self.module.named_parameters()}, self.fragments
        return {names[p]: {"master": fragment.piece(fragment.flat)} for p, fragment in fragments.items()}

    @behind_veil
    def load_model_state(self, module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Take over a checkpoint's weights; in stage 3 this rank's part of them, if they are divided already."""
        if self.options.stage < 3 or self._released:
            module.load_state_dict(checkpoint["state_dict"], strict=strict)
            return
        fragments = self.fragments if self.optimizer is not None else {}
        load_divided(module, checkpoint["state_dict"], fragments, self.ranks.rank, strict)

    @behind_veil
    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take over 32-bit copies, by the names of their parameters."""
        if not self._has_masters:
            return
        names = {p: clean_name(n) for n, p in self.module.named_parameters()}
        for parameter, fragment in self.fragments.items():
            if names[parameter] in masters:
                fragment.write(fragment.flat, masters[names[parameter]])

    @behind_veil
    def optimizer_pieces(self, optimizer: Optimizer) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """This rank's pieces of the optimizer's state, and its groups."""
        if self._saved is not None:
            return self._saved
        return pieces_of(optimizer, self._numbered()) if self._tells else {}, self._numbered_groups(optimizer)

    def _numbered(self) -> dict[int, Fragment]:
        """This rank's fragments by the number that a parameter has in one process's optimizer."""
        parameters, fragments = [p for group in self.groups for p in group], self.fragments
        return {number: fragments[p] for number, p in enumerate(parameters) if p in fragments}

    def _numbered_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        numbers = iter(range(sum(map(len, self.groups))))
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [next(numbers) for _ in params],
            }
            for group, params in zip(optimizer.param_groups, self.groups, strict=True)
        ]

    def optimizer_state(self, optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
        """The whole optimizer's state on the gathering rank, nothing elsewhere."""
        mine, groups = self.optimizer_pieces(optimizer)
        parts = gather(mine)
        return {} if parts is None else {"state": join_pieces(parts), "param_groups": groups}

    @behind_veil
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole optimizer's state."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(group) for group in self.groups]:
            raise ValueError(
                f"The checkpoint's {type(optimizer).__name__} has parameter groups of sizes {sizes}, this run's has"
                f" {[len(group) for group in self.groups]}. Resume with the optimizer that saved it."
            )
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [p for group in self.groups for p in group]
        place = {p: n for n, p in zip(numbers, parameters, strict=True)}
        local: dict[int, Any] = {}
        groups, count = [], 0
        for saved, params in zip(state["param_groups"], self.groups, strict=True):
            owned = [p for p in params if p in self.fragments]
            cuts = [cut_state(state["state"].get(place[p], {}), self.fragments[p]) for p in owned]
            local |= {count + i: cut for i, cut in enumerate(cuts) if cut}
            groups.append({**saved, "params": list(range(count, count + len(owned)))})
            count += len(owned)
        with self.segments():
            optimizer.load_state_dict({"state": local, "param_groups": groups})

    @behind_veil
    def extra_state(self, gather: Gather) -> dict[str, Any]:
        """What a checkpoint needs beside weights and optimizer states."""
        if not self._has_masters:
            return {}
        parts = gather(self._masters or self._own_masters())
        if parts is None:
            return {}
        return {MASTERS: {name: fields["master"] for name, fields in join_pieces(parts).items()}}

    @behind_veil
    def model_states(self, optimizers: Sequence[Optimizer]) -> ModelStates:
        """What the paper promises this rank, and what DeepSpeed's vectors add; collective.

        DeepSpeed updates a copy also of parameters that have as many bits themselves. Its stages 1 and 2 free
        gradients in their step; stage 3 keeps them, and the bucket that they pass.
        """
        trained = [p for group in self.groups for p in group if p.requires_grad]
        size, copy = self.options.dtype.itemsize, self.options.updated.itemsize
        ranks, stage = self.ranks.size, self.options.stage
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
        parts = sum(flat.numel() for flat in flat_vectors(self.inner))
        states = ((segment, state) for o in optimizers for segment, state in o.state.items())
        by_element, counters = state_sizes(states)
        [by_element] = most_of_ranks([by_element], self.control)
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        divided = [p.ds_tensor if stage == 3 else p for p in frozen]  # type: ignore[attr-defined]
        return promise(
            stage, ranks, parameters, StateBytes(size, size, copy + by_element), size,
            held={
                "parameters": parts if stage == 3 else parts * ranks,
                "gradients": parts + self.options.bucket_elements if stage == 3 else 0,
                "copy": parts,
            },
            copy_bytes=copy, owned=sum(fragment.numel for fragment in self.fragments.values()), counters=counters,
            frozen=sum(p.nbytes for p in divided),
        )  # fmt: skip

    @behind_veil
    def keep_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Before the ranks part: what may be saved afterwards."""
        if self.optimizer is not None:
            self._saved = self.optimizer_pieces(self.optimizer)
            self._masters, self._model = self._own_masters(), self.model_pieces(self.module)
