"""`ZeROStrategy`: data parallelism in which ranks do not all hold the same optimizer states, gradients and parameters.

The one idea: the module trains as under DDP, step for step; what ranks divide is behind `parameter.grad` and
`optimizer.step`. An engine does the dividing, and this class hands it the moments of Lightning's loops.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_parallel.failure.patience import Moving, Patience
from lightning_parallel.pipeline.partition.compiled import is_compiled
from lightning_parallel.strategies.base import StartMethod
from lightning_parallel.strategies.zero_arguments import Engine, engine_of, refuse_zero_arguments
from lightning_parallel.strategies.zero_checkpoints import AnyEngine
from lightning_parallel.strategies.zero_division import ZeRODivision
from lightning_parallel.trainer.loops import leave_inference_mode
from lightning_parallel.trainer.norm_sync import apply_sync
from lightning_parallel.trainer.refusals import refuse_no_memory, refuse_saving_pretrained, refuse_scripts
from lightning_parallel.trainer.state.optimizer_states import share_methods, states_to_device
from lightning_parallel.trainer.state.weight_callbacks import model_copies, refuse_sharded
from lightning_parallel.zero.activation_checkpoints import ActivationCheckpoints
from lightning_parallel.zero.allocator import ask_for_expandable_segments
from lightning_parallel.zero.compiled_names import clean_state_dicts
from lightning_parallel.zero.deepspeed.engine import DeepSpeedEngine
from lightning_parallel.zero.deepspeed.setup import (
    DeepSpeedOptions,
    connect_deepspeed,
    forgotten_on_failure,
    import_deepspeed,
)
from lightning_parallel.zero.expected_bytes import ModelStates
from lightning_parallel.zero.fsdp2.engine import ShardedEngine, refuse_on_shards
from lightning_parallel.zero.fsdp2.sharding import Prefetch
from lightning_parallel.zero.native.engine import NativeEngine
from lightning_parallel.zero.native.partition import Partition
from lightning_parallel.zero.optimizer.elementwise import refuse_optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ZeROStrategy(ZeRODivision):
    """Divides model states among data-parallel ranks: optimizer states, gradients too, parameters too.

    Ranks see different rows, as under DDP, and the model trains as it does there. With mixed-precision Adam a parameter
    takes 4 + 12/N bytes on a rank in stage 1, 2 + 14/N in stage 2, 16/N in stage 3, beside 16 under DDP; stages 1 and 2
    move as much as DDP, stage 3 half as much again.

    Args:
        stage: 1 divides optimizer states, 2 gradients too, 3 parameters too.
        engine: "native" for stages 1 and 2, flat buckets of this library; "fsdp2" for stages 2 and 3, PyTorch's
            `fully_shard`; "deepspeed" for all three (`pip install deepspeed`). Default is native
            where it can.
        bucket_mb: native, deepspeed: megabytes of gradients that are reduced at a time.
        blocks: fsdp2: what is gathered at a time: "auto" (what lies in the outermost lists of modules), the name of a
            container, or names of blocks.
        keep_root: fsdp2, stage 3: keep what lies outside of blocks from forward to backward, which begins with it. A
            gather of it less than the 3P of the paper; the peak is not higher.
        prefetch: fsdp2, on GPUs: gather blocks further ahead than FSDP2 does: "none", on the way "forward", or "both".
        master_weights: with parameters of 16 bits (`precision="bf16-true"` or `"16-true"`), let the optimizer update
            a divided copy of 32 bits, as in the paper.
        shard_size: divide among so many neighbouring ranks only, such as those of one host, and hold the same parts on
            every such group, between which gradients are averaged part by part. Default is all ranks.
        offload: keep optimizer states (fsdp2: parameters and gradients too; deepspeed in stage 3: parameters too) in
            the host's memory, and update there.
        activation_checkpointing: from forward to backward keep the inputs of blocks alone, and compute the rest again:
            True for `blocks="auto"`, or the name of a container, or names of blocks.
        offload_checkpoints: with it, let these inputs wait in the host's memory. (What the paper partitions, P_a, are
            inputs that tensor-parallel ranks hold alike; data-parallel ranks have one each.)
        expandable_segments: on GPUs, ask PyTorch's allocator for segments that grow, so that memory does not fragment;
            what `PYTORCH_ALLOC_CONF` says goes first.
        state_dict_type: "full" saves one file as one process does; "sharded" a folder into which every rank writes its
            share of it, for which no rank gathers all (`lightning-parallel consolidate` makes one file of it). Either
            is resumed from, whichever is set. Of a folder a rank reads what it will hold: its part of the optimizer's
            states and, with engine="fsdp2" or in stage 3, of the weights; else all weights.
        broadcast_buffers: give every rank the first one's buffers before a training step, as DDP does.
        start_method, timeout, patience, **kwargs: see `MeshStrategy`.

    Raises:
        ValueError: an argument is not as described.
        ModuleNotFoundError: `engine="deepspeed"`, and DeepSpeed is not installed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = ZeROStrategy(stage=2)
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy)  # doctest: +SKIP

    Source:
        Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """

    def __init__(
        self,
        stage: int = 2,
        engine: Engine | None = None,
        bucket_mb: float = 128.0,
        blocks: str | Sequence[str] = "auto",
        keep_root: bool = False,
        prefetch: Prefetch = "forward",
        master_weights: bool = True,
        shard_size: int | None = None,
        offload: bool = False,
        activation_checkpointing: bool | str | Sequence[str] = False,
        offload_checkpoints: bool = False,
        expandable_segments: bool = True,
        state_dict_type: Literal["full", "sharded"] = "full",
        broadcast_buffers: bool = True,
        start_method: StartMethod = "popen",
        timeout: timedelta = timedelta(minutes=30),
        patience: Patience | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(state_dict_type, start_method=start_method, timeout=timeout, patience=patience, **kwargs)
        engine = engine_of(self, stage, engine)
        refuse_zero_arguments(
            self, engine, blocks=blocks, activation_checkpointing=activation_checkpointing, prefetch=prefetch,
            offload_checkpoints=offload_checkpoints, bucket_mb=bucket_mb, shard_size=shard_size,
            master_weights=master_weights, offload=offload, broadcast_buffers=broadcast_buffers,
            expandable_segments=expandable_segments, keep_root=keep_root,
        )  # fmt: skip
        self.shard_size = shard_size
        self.zero_stage, self.engine_name = stage, engine
        self.bucket_mb, self.master_weights, self.offload = bucket_mb, master_weights, offload
        self.broadcast_buffers, self.blocks = broadcast_buffers, blocks
        self.activation_checkpointing, self.offload_checkpoints = activation_checkpointing, offload_checkpoints
        self.expandable_segments, self.keep_root, self.prefetch = expandable_segments, keep_root, prefetch
        self._checkpoints: ActivationCheckpoints | None = None
        self._control: Any = None
        self._loss_scale: Any = None
        self.loads_shards = (stage, engine) == (3, "deepspeed") or engine == "fsdp2"

    @property
    def control(self) -> Any:
        """A process group for host tensors; it exists while a run does."""
        return self._control

    def axes(self) -> Mapping[str, int]:
        return {"data": self.world_size}

    def model_states(self) -> ModelStates:
        """What the stage promises this rank in bytes, for callbacks; once an optimizer has stepped."""
        return self.engine.model_states(self.optimizers)

    def _host_groups(self) -> Collection[int]:
        return {id(self._control), *super()._host_groups()}

    def axis_of(self, group: Any) -> str:
        replicas = getattr(self._engine, "replicas", None)
        return "replicas" if replicas is not None and group is replicas else super().axis_of(group)

    # -- set-up and teardown -------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self.ask_for_memory(self.root_device)
        super().setup_environment()

    def ask_for_memory(self, device: torch.device) -> None:
        """Set the allocator of a device that has not started."""
        if device.type == "cuda" and self.expandable_segments:
            advice = ask_for_expandable_segments(os.environ, torch.cuda.is_initialized())
            if advice is not None:
                rank_zero_info(advice)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.let_host_run_ahead(trainer)
        refuse_no_memory(self.lightning_module, type(self).__name__, parameters_too=True)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            self.model = apply_sync(self._layer_sync, self.model)
        clean_state_dicts(self.lightning_module)
        self._engine, self._is_engaged, self._may_save = None, True, None
        assert self.watch is not None
        with self.opening_groups():
            self._control = dist.new_group(backend="gloo")
        self._reset_optimizers_and_schedulers()
        if trainer.state.fn == TrainerFn.FITTING and self.activation_checkpointing:
            self._checkpoints = self._checkpoint_blocks()
        if self.engine_name == "fsdp2":
            refuse_scripts(self.lightning_module, 'engine="fsdp2" puts hooks and shards into modules')
            self._engine = self._shard(trainer)
            self._may_save = refuse_saving_pretrained(
                self.lightning_module, "share of every parameter", "Call it behind fit, or"
            )
            self._load_waiting()
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        elif self.engine_name == "deepspeed" and self.zero_stage == 3:
            self._engine = make_engine(self, trainer, [])
            self._load_waiting()
        self.setup_precision_plugin()
        share_methods(self._lightning_optimizers)
        if trainer.state.fn == TrainerFn.FITTING and not self.offload and self.engine_name == "native":
            states_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Call `configure_optimizers` as it is, then divide what its optimizers update."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        for optimizer in self.optimizers:
            refuse_optimizer(optimizer, type(self).__name__)
            if self.engine_name == "fsdp2":
                refuse_on_shards(optimizer)
        if self.engine_name == "native":
            partition = Partition(
                self.lightning_module, self.optimizers, self._ranks(), self._options(),
                control=self._control, waiting=self.blocked, agree=self._agree,
            )  # fmt: skip
            self._engine = NativeEngine(partition, self.broadcast_buffers)
        elif self.engine_name == "deepspeed":
            self._engine = make_engine(self, trainer, self.optimizers)
            self.precision_plugin.clip_grad_by_value = refuse_clipping_by_value  # type: ignore[assignment]
            self._load_waiting()
            self._loss_scale = scale_by_engine(self)
        elif isinstance(self._engine, ShardedEngine):
            self._engine.take(self.optimizers)
        self.engine.load_masters(self._masters)
        self._masters = {}
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            # Lightning takes a fused optimizer for one that unscales gradients, though here nothing scales them.
            plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        if isinstance(self._engine, ShardedEngine):
            self._engine.to_device()
        else:
            self.lightning_module.to(self.root_device)

    def _disengage(self, engine: AnyEngine, failed: bool) -> None:
        if self._may_save is not None:
            self._may_save()
        if self.watch is None or failed:
            engine.release(failed=True)
            return
        with self.blocked(Moving("the other ranks at the end of the run")):
            engine.keep_states(self.optimizers)
            engine.release()

    def teardown(self) -> None:
        for replaced in ("clip_grad_by_norm", "clip_grad_by_value", "clip_gradients"):
            self.precision_plugin.__dict__.pop(replaced, None)
        failed = self.failed
        if self._engine is not None and self._is_engaged:
            self._is_engaged = False  # a hook behind this one may fail, and Lightning tears down again
            self._disengage(self._engine, failed)
        if self._loss_scale is not None:
            self._loss_scale.release()
            self._loss_scale = None
        if self._checkpoints is not None:
            self._checkpoints.remove()
            self._checkpoints = None
        super().teardown()
        self._control = None
        if self.lightning_module is None:
            return
        if self._layer_sync is not None:
            self.model = self._layer_sync.revert(self.lightning_module)
        if failed and self.root_device.type != "cpu":  # which may never answer
            return
        states_to_device(self.optimizers, torch.device("cpu"))
        if not any(x.is_meta for x in (*self.lightning_module.parameters(), *self.lightning_module.buffers())):
            self.lightning_module.to("cpu")


_DTYPES = {
    "32-true": torch.float32, "bf16-mixed": torch.float32, "16-mixed": torch.float32, "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}  # fmt: skip


def make_engine(strategy: ZeROStrategy, trainer: Trainer, optimizers: Sequence[Optimizer]) -> DeepSpeedEngine:
    """Divide the strategy's module and its optimizer. Collective.

    Raises:
        ValueError: the Trainer asks for what DeepSpeed does not do here.
    """
    module = strategy.lightning_module
    assert module is not None
    precision = refuse_settings(strategy, trainer)
    device = strategy.root_device
    rank = {
        "RANK": strategy.global_rank, "WORLD_SIZE": strategy.world_size,
        "LOCAL_RANK": strategy.local_rank, "LOCAL_SIZE": strategy.num_processes,
    }  # fmt: skip
    nbytes = max(1, int(strategy.bucket_mb * 2**20))
    options = DeepSpeedOptions(
        strategy.zero_stage, nbytes, _DTYPES[precision], strategy.offload, strategy.master_weights
    )
    assert strategy.watch is not None
    with forgotten_on_failure():
        connect_deepspeed(import_deepspeed(device), device, rank)
        with strategy.opening_groups():  # of DeepSpeed's own groups, too
            engine = DeepSpeedEngine(
                module, optimizers, device, options, strategy.local_rank, strategy.control, strategy.blocked,
                strategy._ranks(),
            )  # fmt: skip
    engine.broadcast_buffers = strategy.broadcast_buffers
    return engine


def scale_by_engine(strategy: ZeROStrategy) -> Any:
    """With float16 the scaler asks the engine about gradients; None without a scaler."""
    plugin, engine = strategy.precision_plugin, strategy.engine
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or not isinstance(engine, DeepSpeedEngine):
        return None
    return engine.scale_by(scaler)


def refuse_settings(strategy: ZeROStrategy, trainer: Trainer) -> str:
    """Raise for what this engine does not do; returns the precision.

    Raises:
        ValueError: a precision, a logger that traces the model, a callback that holds a copy of it, or what is compiled
            in it.
    """
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    assert module is not None
    precision = str(getattr(plugin, "precision", ""))
    if precision not in _DTYPES:
        known = ", ".join(f'"{name}"' for name in _DTYPES)
        raise ValueError(f'ZeROStrategy(engine="deepspeed") runs with precision={known}, not {precision!r}.')
    if strategy.zero_stage == 3:
        leave_inference_mode(trainer)
        if module.example_input_array is not None and any(getattr(g, "_log_graph", False) for g in trainer.loggers):
            raise ValueError(
                'A logger with log_graph=True traces the whole model, of which ZeROStrategy(engine="deepspeed") leaves'
                " each process a part. Leave log_graph out, and log the graph in one process."
            )
        if model_copies(trainer, module):
            raise ValueError(
                "A callback holds a copy of the model, as those that average weights do, and DeepSpeed's stage 3 does"
                ' not divide copies. Use engine="fsdp2", or stage 1 or 2.'
            )
        if compiled := [name or type(part).__name__ for name, part in module.named_modules() if is_compiled(part)]:
            raise ValueError(
                f"`{compiled[0]}` is compiled, and DeepSpeed's stage 3 gathers parameters in hooks that torch.compile"
                ' does not get through. Compile nothing, or use engine="fsdp2", or stage 1 or 2.'
            )
    if strategy.state_dict_type == "sharded":
        refuse_sharded(trainer, module, type(strategy).__name__)
    return precision


def refuse_clipping_by_value(*_: Any) -> None:
    """What stands in place of the precision plugin's clipping by value.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        'ZeROStrategy(engine="deepspeed") clips by norm alone: DeepSpeed holds gradients where no hook sees them. Use'
        ' gradient_clip_algorithm="norm", or engine="native".'
    )
