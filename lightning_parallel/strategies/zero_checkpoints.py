"""What ZeRO saves and loads: one process's checkpoint, or a folder into which every rank writes its share.

The one idea: states are told in pieces of one process's, by number and name. Pieces are gathered on global rank 0, or
dealt out tensor by tensor, so that no rank holds all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.checkpoint.parts import StoredTensor
from lightning_parallel.checkpoint.sharded import is_sharded, load_sharded
from lightning_parallel.failure.patience import Moving
from lightning_parallel.strategies.checkpoints import FileOrFolder, names_of_state, unwrapped
from lightning_parallel.trainer.state.checkpoint_io import as_lightning_reads
from lightning_parallel.zero.compiled_names import clean_state_dicts
from lightning_parallel.zero.deepspeed.engine import DeepSpeedEngine
from lightning_parallel.zero.fsdp2.engine import ShardedEngine
from lightning_parallel.zero.native.engine import MASTERS, NativeEngine
from lightning_parallel.zero.optimizer.state import whole_on_owners

AnyEngine = NativeEngine | ShardedEngine | DeepSpeedEngine


class ZeROCheckpoints(FileOrFolder):
    """The part of `ZeROStrategy` that saves and loads.

    Args:
        *args, **kwargs: see `FileOrFolder`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine: AnyEngine | None = None
        self._is_engaged = False  # until it is released
        self._may_save: Callable[[], None] | None = None  # lets `save_pretrained` write again
        self._masters: Mapping[str, Tensor] = {}  # 32-bit copies of a checkpoint, until there is an engine
        self._waiting: Callable[[], None] | None = None  # loads a folder's weights once they are divided

    loads_shards = False  # whether weights are loaded when they are divided already

    @property
    def engine(self) -> AnyEngine:
        """What divides the model's states; it exists in `fit`, and after it for saving."""
        assert self._engine is not None, "the engine exists after setup"
        return self._engine

    def _load_waiting(self) -> None:
        """Load what has waited until states are divided."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()

    def _gather(self, part: Any) -> list[Any] | None:
        """Every rank's part on global rank 0, None elsewhere."""
        if self.world_size == 1:
            return [part]
        self.raise_failure()
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        with self.connected(), self.blocked(Moving("the other ranks' states")):
            dist.gather_object(part, parts)
        return parts

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's state, at least on global rank 0; all ranks call it."""
        assert self.lightning_module is not None
        if self._engine is None:
            return super().lightning_module_state_dict()
        if self.state_dict_type == "sharded":
            pieces = self.engine.model_pieces(self.lightning_module)
            whole = self._deal_out(pieces, names_of_state(self.lightning_module))
            return {name: fields["value"] for name, fields in whole.items()}
        return self.engine.model_state(self.lightning_module, self._gather)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on global rank 0, nothing elsewhere; all ranks call it."""
        inner = unwrapped(optimizer)
        if self.state_dict_type == "sharded":
            pieces, groups = self.engine.optimizer_pieces(inner)
            numbers = [number for group in groups for number in group["params"]]
            return {"state": self._deal_out(pieces, numbers), "param_groups": groups}
        return self.engine.optimizer_state(inner, self._gather)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        full = self.state_dict_type == "full"
        if full and "optimizer_states" in checkpoint and self._engine is not None:
            checkpoint.update(self.engine.extra_state(self._gather))
        with self.connected():  # after the run nothing else keeps the other ranks from reading it too soon
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _deal_out(self, pieces: Mapping[Any, Any], keys: Sequence[Any]) -> dict[Any, Any]:
        """What this rank is to save of all ranks' pieces."""
        self.raise_failure()
        with self.connected(), self.blocked(Moving("the other ranks' states")):
            return whole_on_owners(pieces, keys, self._deal)

    def _deal(self, part: Any, turn: int) -> list[Any] | None:
        owner = turn % self.world_size
        if self.world_size == 1:
            return [part]
        parts: list[Any] | None = [None] * self.world_size if self.global_rank == owner else None
        dist.gather_object(part, parts, dst=owner)
        return parts

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if is_sharded(Path(checkpoint_path)):
            return load_sharded(Path(checkpoint_path), weights_only=as_lightning_reads(weights_only), in_parts=True)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._engine is not None:
            self.engine.load_model_state(self.lightning_module, checkpoint, strict)
            return
        if self.loads_shards and any(isinstance(v, StoredTensor) for v in checkpoint["state_dict"].values()):
            self._waiting = partial(self.load_model_state_dict, checkpoint, strict)
            return
        clean_state_dicts(self.lightning_module)
        super().load_model_state_dict(checkpoint, strict)
        self._masters = checkpoint.get(MASTERS) or {k: v for k, v in checkpoint["state_dict"].items() if _is_wide(v)}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.engine.load_optimizer_state(optimizer, state)


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32
