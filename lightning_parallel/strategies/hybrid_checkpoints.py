"""What a pipeline saves and loads whose copies along the data axis divide states.

The one idea: where the pipeline asks for the states of this rank's stages, the copies' pieces are brought together, on
the first of them or dealt out where each saves a share; where it hands states over, a rank takes its piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_parallel.checkpoint.full import States
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.zero.stage_states import StageStates, joined
from lightning_parallel.zero.state import whole_on_owners


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
        if self.state_dict_type == "sharded" and self.pipeline.data.place:  # what is whole the first copy saves
            state = {name: value for name, value in state.items() if name in entries and entries[name].name in divided}
        if not divided:
            return state
        self.raise_failure()
        with self.connected():
            whole = states.parameters(self._bring)
        of = {name: entries[name].name if name in entries else name for name in state}
        return {
            name: whole.get(of[name], value)
            for name, value in state.items()
            if of[name] in whole or of[name] not in divided
        }

    def _to_save(self, own: dict[Any, Any]) -> dict[Any, Any]:
        if self._states is None:
            return super()._to_save(own)
        return own if self.pipeline.tensor.place == 0 else {}

    def _states_of(self, optimizer: Optimizer) -> States:
        if self._states is None:
            return super()._states_of(optimizer)
        return self._states.optimizer_states(optimizer, self._bring)

    def _load_into(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self._states is None:
            super()._load_into(optimizer, state)
        else:
            self._states.load_optimizer(optimizer, state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._states is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        with self._states.windows.whole():
            super().load_model_state_dict(checkpoint, strict)
            self._states.refresh()

    def _bring(self, pieces: Mapping[Any, Mapping[str, Any]], keys: Sequence[Any]) -> Mapping[Any, Mapping[str, Any]]:
        """Whole tensors of the copies' pieces: all on the first copy, or dealt out to them where each saves a share."""
        if self._states is not None and not self._released:
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
