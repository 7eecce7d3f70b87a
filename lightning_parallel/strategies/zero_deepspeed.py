"""How `ZeROStrategy` runs with DeepSpeed as its engine: what it hands over, and what it refuses.

The one idea: DeepSpeed gets a module, an optimizer and a configuration, and nothing of the Trainer's. Batches,
precision contexts, loops and files stay this library's, which is why CPU runs, accumulation and checkpoints are as with
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import Optimizer

from lightning_parallel.pipeline.partition.compiled import is_compiled
from lightning_parallel.trainer.loops import leave_inference_mode
from lightning_parallel.trainer.state.weight_callbacks import model_copies, refuse_sharded
from lightning_parallel.zero.deepspeed.engine import DeepSpeedEngine
from lightning_parallel.zero.deepspeed.setup import (
    DeepSpeedOptions,
    connect_deepspeed,
    forgotten_on_failure,
    import_deepspeed,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_parallel.strategies.zero import ZeROStrategy

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
