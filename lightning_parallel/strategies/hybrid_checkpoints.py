"""What a pipeline saves and loads whose copies along the data axis divide states.

The one idea: where the pipeline asks for the states of this rank's stages, the copies' pieces are brought together, on
the first of them or dealt out where each saves a share; where it hands states over, a rank takes its piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.checkpoint.full import States, own_state_dict
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.zero.native.engine import MASTERS
from lightning_parallel.zero.native.stage_states import StageStates, joined
from lightning_parallel.zero.optimizer.state import Piece, whole_on_owners
from lightning_parallel.zero.sharded_gradient import ShardedValues


class DividedCheckpoints(PipelineStrategy):
    """The part of `DividedPipeline` that saves and loads.

    Args:
        zero_stage: see `DividedPipeline`.
        **kwargs: see `PipelineStrategy`.
    """

    def __init__(self, zero_stage: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.zero_stage = zero_stage
        self._states: StageStates | None = None
        self._released = False  # whether parameters have been given back whole, at the end of a run

    def _module_state(self) -> Mapping[str, Any]:
        state, states = super()._module_state(), self._states
        if states is None:
            return state
        entries = self.pipeline.table.by_name
        divided = states.divided if self.zero_stage == 3 and not self._released else frozenset()
        wide = self.state_dict_type == "sharded"  # a folder holds copies of 32 bits as weights
        if wide:
            divided |= states.copied
        if self.state_dict_type == "sharded" and self.pipeline.data.place:  # what is whole the first copy saves
            state = {name: value for name, value in state.items() if name in entries and entries[name].name in divided}
        if not divided:
            return state
        self.raise_failure()
        with self.connected():
            whole = states.parameters(self._bring, divided, wide)
        of = {name: entries[name].name if name in entries else name for name in state}
        return {
            name: whole.get(of[name], value)
            for name, value in state.items()
            if of[name] in whole or of[name] not in divided
        }

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return super()._whole(self._joined(state))

    def _joined(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state dict with what is divided in it, as in that of a callback's copy of the model, made whole on the
        first copy and left out on others."""
        states, entries = self._states, self.pipeline.table.by_name
        parts = {name: value for name, value in state.items() if isinstance(value, ShardedValues)}
        if states is None or not parts:
            return state
        of = {name: entries[name].name for name in parts}
        own = {
            of[name]: {"value": Piece(states.begin_of(of[name]), part.local.cpu().clone(), part.shape)}
            for name, part in parts.items()
            if part.local.numel()
        }
        self.raise_failure()
        with self.connected():
            whole = self._bring(own, list(dict.fromkeys(of.values())))
        kept = {name: value for name, value in state.items() if name not in parts or of[name] in whole}
        return {name: whole[of[name]]["value"] if name in parts else value for name, value in kept.items()}

    def _to_save(self, own: dict[Any, Any]) -> dict[Any, Any]:
        return super()._to_save(own) if self._states is None else own  # copies have dealt them out

    def _states_of(self, optimizer: Optimizer) -> States:
        if self._states is None:
            return super()._states_of(optimizer)
        return self._states.optimizer_states(optimizer, self._bring)

    def _states_to_device(self) -> None:
        if self._states is None or self._states.partition.options.offload is None:
            super()._states_to_device()

    def _load_into(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self._states is None:
            super()._load_into(optimizer, state)
        else:
            self._states.load_optimizer(optimizer, state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._states is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        saved = {**checkpoint["state_dict"], **checkpoint.get(MASTERS, {})}
        copied = {name: value for name, value in saved.items() if name in self._states.copied and _is_wide(value)}
        with self._states.windows.whole():
            super().load_model_state_dict(checkpoint, strict)
            self._states.refresh({name: self.tensor.part(name, value) for name, value in copied.items()})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if self._states is not None and self.state_dict_type == "full" and "optimizer_states" in checkpoint:
            checkpoint.update(self._masters(self._states))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _masters(self, states: StageStates) -> dict[str, Any]:
        """What a file has beside weights of 16 bits, on global rank 0; all ranks call it."""
        if not states.partition.options.master_weights or self.lightning_module is None:
            return {}
        self.raise_failure()
        with self.connected():
            own = states.parameters(self._bring, states.copied, wide=True)
            parts = self.pipeline.gather(own_state_dict(own, self.pipeline.table, self.tensor))
        whole = {name: value for part in parts or () for name, value in part.items()}
        names = [name for name in self.pipeline.table.by_name if name in whole]
        return {MASTERS: {name: whole[name] for name in names}} if whole and self.pipeline.copy == 0 else {}

    def _bring(self, pieces: Mapping[Any, Mapping[str, Any]], keys: Sequence[Any]) -> Mapping[Any, Mapping[str, Any]]:
        """Whole tensors of the copies' pieces: all on the first copy, or dealt out to them where each saves a share."""
        if self._states is not None and not self._released and not self._is_saving:
            self._states.pause()  # a copy that trains on is told so
        with self.blocked("the other copies' states"):
            if self.state_dict_type == "sharded":
                return whole_on_owners(pieces, keys, self._gather_on)
            return joined(self._gather_on(pieces, 0))

    def _gather_on(self, part: Any, turn: int) -> list[Any] | None:
        ranks = self.pipeline.data.ranks
        owner = ranks[turn % len(ranks)]
        parts: list[Any] | None = [None] * len(ranks) if self.global_rank == owner else None
        dist.gather_object(part, parts, dst=owner, group=self.group("data"))
        return parts


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32
