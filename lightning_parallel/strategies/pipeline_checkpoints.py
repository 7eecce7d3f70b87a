"""What a pipeline saves and loads: one process's checkpoint, or a folder to which every rank adds its part.

The one idea: Lightning asks a strategy for the states of model and optimizers and hands back what it has read; here a
rank answers with its stage's part, gathered to the whole or not, and takes its part of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_parallel.checkpoint.full import (
    PrunedOptimizer,
    States,
    full_state_dict,
    load_full_state_dict,
    own_state_dict,
)
from lightning_parallel.checkpoint.sharded import is_sharded, load_sharded
from lightning_parallel.checkpoint.slices import TensorSlice
from lightning_parallel.parallel.shares import ShardMap
from lightning_parallel.parallel.uncut import Uncut
from lightning_parallel.pipeline.runtime.assembly import Pipeline
from lightning_parallel.strategies.checkpoints import FileOrFolder, unwrapped
from lightning_parallel.trainer.state.checkpoint_io import as_lightning_reads
from lightning_parallel.trainer.state.optimizer_states import states_to_device
from lightning_parallel.trainer.state.weight_callbacks import catch_up, tell_whole_groups
from lightning_parallel.zero.optimizer.guarded_state import exposed, held_state


class PipelineCheckpoints(FileOrFolder):
    """The part of a pipeline strategy that saves and loads.

    Args:
        *args, **kwargs: see `FileOrFolder`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeline: Pipeline | None = None
        self._pruned: dict[int, PrunedOptimizer] = {}
        self.tensor = Uncut()  # how parameters are cut over the tensor axis

    @property
    def pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "the pipeline exists after setup"
        return self._pipeline

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's state on global rank 0, nothing elsewhere (sharded: a rank's part); all ranks call it."""
        assert self.lightning_module is not None
        if self._pipeline is None:  # in the process that forked the ranks: the weights have come back to it
            return super().lightning_module_state_dict()
        state = self._module_state()
        if self.state_dict_type == "sharded":
            return self._to_save(own_state_dict(state, self.pipeline.table))
        return self._whole(state)

    def _module_state(self) -> Mapping[str, Any]:
        """The module's state with the values of what this rank holds."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def _to_save(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Of what this rank's stages have, what this rank saves in a folder: the first copy saves all."""
        return own if self.pipeline.data.place == 0 else {}

    def _written(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Slices of what the tensor axis cut; what is whole the axis's first rank writes."""
        tensor, found = self.pipeline.tensor, dict[str, Any]()
        for name, value in flat.items():
            shares = self._shares_of(name)
            if shares is not None and getattr(value, "shape", None) == shares.local_shape(tensor.place):
                found[name] = TensorSlice(shares, tensor.place, value)
            elif tensor.place == 0:
                found[name] = value
        return found

    def _room(self, name: str, kind: TensorStorageMetadata) -> TensorSlice | None:
        """Where this rank reads its part of what the tensor axis cuts."""
        shares, place = self._shares_of(name), self.pipeline.tensor.place
        if shares is None or tuple(kind.size) != shares.shape:
            return None
        return TensorSlice(shares, place, torch.empty(shares.local_shape(place), dtype=kind.properties.dtype))

    def _shares_of(self, name: str) -> ShardMap | None:
        """How the tensor axis cuts a folder's tensor of that name."""
        kind, _, key = name.partition("/")
        if kind == "optimizer":
            number, parameter, _ = key.split("/", 2)
            key = [*self._pruned.values()][int(number)].names[int(parameter)]
        return self.tensor.shares.get(key)

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the model, or of a callback's copy of it, made whole on global rank 0."""
        self.raise_failure()
        with self.connected():
            whole = full_state_dict(state, self.pipeline.table, self.pipeline.gather, self.tensor)
        return whole if self.pipeline.copy == 0 else {}  # the first copy's state is the model's

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on global rank 0, nothing elsewhere (sharded: a part); all ranks call it."""
        pruned = self._pruned[id(unwrapped(optimizer))]
        self.raise_failure()
        with self.connected():
            states = self._states_of(pruned.optimizer)
            if self.state_dict_type == "sharded":
                own = pruned.own_state(states)
                return {**own, "state": self._to_save(own["state"])}
            whole = pruned.full_state(self.pipeline.gather, states)
        return whole if self.pipeline.copy == 0 else {}

    def _states_of(self, optimizer: Optimizer) -> States:
        """An optimizer's states of this rank's parameters."""
        return held_state(optimizer)

    def _load_into(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take over an optimizer's states of this rank's parameters."""
        with exposed(optimizer):
            optimizer.load_state_dict(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        if self._pipeline is None:  # in the process that forked the ranks, with whom optimizers have ended
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        groups = [self._pruned[id(optimizer)].groups for optimizer in self.optimizers if id(optimizer) in self._pruned]
        tell_whole_groups(self.lightning_module.trainer, checkpoint, groups)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if self._pipeline is not None and is_sharded(Path(checkpoint_path)):
            return load_sharded(Path(checkpoint_path), self._holds, as_lightning_reads(weights_only), room=self._room)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _holds(self, name: str) -> bool:
        """Whether this rank needs a sharded checkpoint's tensor of that name."""
        kind, _, key = name.partition("/")
        if kind == "optimizer":
            number, parameter, _ = key.split("/", 2)
            pruned = list(self._pruned.values())
            return int(number) < len(pruned) and pruned[int(number)].holds(int(parameter))
        table = self.pipeline.table
        return key not in table.by_name or table.owns(key)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_full_state_dict(self.lightning_module, self.pipeline.table, checkpoint["state_dict"], strict, self.tensor)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        replaced = catch_up(self.lightning_module.trainer, self.lightning_module)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if replaced:
                self._pruned[id(optimizer)].take_over()
            self._pruned[id(optimizer)].load_full_state(state, partial(self._load_into, optimizer))
        self._states_to_device()

    def _states_to_device(self) -> None:
        """Optimizer states lie where they are updated."""
        states_to_device(self.optimizers, self.root_device)
