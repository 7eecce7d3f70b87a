"""Among whom `ZeROStrategy` divides what: groups of ranks, meshes, and the engines' options.

The one idea: the strategy's arguments become what an engine is made of, once a run's ranks are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel.mesh import build_mesh
from lightning_parallel.strategies.zero_steps import ZeROSteps
from lightning_parallel.trainer.loops import leave_inference_mode
from lightning_parallel.trainer.state.weight_callbacks import hold_whole_states, model_copies, refuse_sharded
from lightning_parallel.zero.activation_checkpoints import ActivationCheckpoints, on_host
from lightning_parallel.zero.fsdp2.engine import ShardedEngine
from lightning_parallel.zero.fsdp2.sharding import Prefetch
from lightning_parallel.zero.fsdp2.shards import find_blocks
from lightning_parallel.zero.fsdp2.states import ShardOptions
from lightning_parallel.zero.native.partition import Options
from lightning_parallel.zero.ranks import Ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


class ZeRODivision(ZeROSteps):
    """The part of `ZeROStrategy` that says how to divide; its attributes are the strategy's arguments."""

    zero_stage: int
    bucket_mb: float
    blocks: str | Sequence[str]
    keep_root: bool
    prefetch: Prefetch
    master_weights: bool
    shard_size: int | None
    offload: bool
    activation_checkpointing: bool | str | Sequence[str]
    offload_checkpoints: bool
    broadcast_buffers: bool
    _control: Any

    def _ranks(self) -> Ranks:
        """Who shares what: all ranks, or neighbours, whose counterparts elsewhere own the same."""
        size, world, rank = self._size_of_groups(), self.world_size, self.global_rank
        if size == world:
            return Ranks(rank, world)
        assert self.watch is not None
        with self.opening_groups():
            neighbours = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
            counterparts = [dist.new_group(list(range(place, world, size))) for place in range(size)]
        place, replica = rank % size, rank // size
        return Ranks(place, size, neighbours[replica], counterparts[place], world // size, replica)

    def _size_of_groups(self) -> int:
        """How many ranks divide states among themselves."""
        size, world = self.shard_size or self.world_size, self.world_size
        if world % size:
            raise ValueError(
                f"ZeROStrategy(shard_size={size}) cannot divide {world} ranks into groups of {size}. Use a divisor."
            )
        return size

    def _mesh_of_shards(self) -> DeviceMesh:
        """All ranks in one line, or a line for every group that divides the module for itself."""
        size = self._size_of_groups()
        if size == self.world_size:
            return self.mesh["data"]
        assert self.watch is not None
        with self.opening_groups():
            return build_mesh(self.root_device.type, {"replicas": self.world_size // size, "shards": size})

    def _options(self) -> Options:
        offload = torch.device("cpu") if self.offload else None
        return Options(self.zero_stage, max(1, int(self.bucket_mb * 2**20)), self.master_weights, offload)

    def _shard(self, trainer: Trainer) -> ShardedEngine:
        """Shard the module, and copies of it that callbacks hold."""
        module = self.lightning_module
        assert module is not None
        if module.example_input_array is not None and any(getattr(g, "_log_graph", False) for g in trainer.loggers):
            raise ValueError(
                'A logger with log_graph=True traces the whole model, of which ZeROStrategy(engine="fsdp2") leaves each'
                " process a part. Leave log_graph out, and log the graph in one process."
            )
        leave_inference_mode(trainer)
        # Under autocast operations choose their precision, as under DDP; parameters are gathered as they are.
        half = _HALF.get(getattr(self.precision_plugin, "precision", ""))
        options = ShardOptions(
            self.zero_stage, self.blocks, compute=half, master=self.master_weights and half is not None,
            offload=self.offload, keep_root=self.keep_root, prefetch=self.prefetch,
            whole_module=module.automatic_optimization,
        )  # fmt: skip
        copies = model_copies(trainer, module)
        engine = ShardedEngine(
            module, self._mesh_of_shards(), self.root_device, options, self._control, copies, self.blocked
        )
        engine.broadcast_buffers = self.broadcast_buffers
        if self.state_dict_type == "sharded":
            refuse_sharded(trainer, module, type(self).__name__)
        for copied in copies:
            hold_whole_states(copied, lambda state: engine.whole(state, self._gather))
        return engine

    def _checkpoint_blocks(self) -> ActivationCheckpoints:
        assert self.lightning_module is not None
        wanted = self.activation_checkpointing
        blocks = find_blocks(self.lightning_module, "auto" if isinstance(wanted, bool) else wanted)
        if not blocks:
            raise ValueError(
                f"{type(self).__name__}(activation_checkpointing=True) found no list of blocks in"
                f" {type(self.lightning_module).__name__}. Name the blocks, or leave it out."
            )
        return ActivationCheckpoints(blocks, on_host(self.root_device) if self.offload_checkpoints else nullcontext)

    def _agree(self, what: str, names: Any) -> None:
        """Raise unless all ranks put the same parameters into a group."""
        everyone: list[Any] = [None] * self.world_size
        with self.blocked(f"the other ranks' {what}"):
            dist.all_gather_object(everyone, list(names), group=self._control)
        unlike = [rank for rank, others in enumerate(everyone) if others != everyone[0]]
        if unlike:
            raise ValueError(
                f"The ranks added different parameters to {what} (rank {unlike[0]} unlike rank 0). Add the same on"
                " every rank; decide by what all ranks see alike."
            )
