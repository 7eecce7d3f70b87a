"""Which arguments of `ZeROStrategy` go together.

The one idea: what cannot work is refused where the strategy is made, with the value that was given.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, Literal, get_args

from lightning_parallel.strategies.arguments import all_are, is_count, is_positive, refuse_arguments
from lightning_parallel.zero.deepspeed.setup import refuse_missing
from lightning_parallel.zero.fsdp2.sharding import Prefetch

Engine = Literal["native", "fsdp2", "deepspeed"]
_ENGINES: dict[int, tuple[Engine, ...]] = {
    1: ("native", "deepspeed"),
    2: ("native", "fsdp2", "deepspeed"),
    3: ("fsdp2", "deepspeed"),
}
_SWITCHES = ("master_weights", "offload", "broadcast_buffers", "expandable_segments", "keep_root")


def engine_of(strategy: Any, stage: int, engine: Engine | None) -> Engine:
    """The engine that was asked for, or the one that a stage has by default.

    Raises:
        ValueError: there is no such stage, or the engine has none such.
        ModuleNotFoundError: DeepSpeed is asked for, and is not installed.
    """
    refuse_arguments(strategy, stage=(stage, is_count(stage, 1) and stage in _ENGINES, "1, 2 or 3"))
    engines = _ENGINES[stage]
    chosen = engine or engines[0]
    words = " or ".join(f'"{name}"' for name in engines) + f" for stage {stage}"
    if "native" not in engines:
        words += '; HybridStrategy(zero_stage=3, gather="microbatch") divides parameters by this library itself'
    refuse_arguments(strategy, engine=(chosen, chosen in engines, words))
    if chosen == "deepspeed":
        refuse_missing()
    return chosen


def refuse_zero_arguments(strategy: Any, engine: Engine, **given: Any) -> None:
    """Raise for arguments that are not as `ZeROStrategy` describes them.

    Args:
        strategy: whose they are.
        engine: that was chosen.
        **given: by name; all but `stage`, `engine` and those of `MeshStrategy`.

    Raises:
        ValueError: one is not as described.
    """
    blocks, bucket_mb, shard_size = given["blocks"], given["bucket_mb"], given["shard_size"]
    wanted, on_host = given["activation_checkpointing"], given["offload_checkpoints"]
    refuse_arguments(
        strategy,
        blocks=(blocks, isinstance(blocks, str) or all_are(blocks, str), '"auto", a name or names'),
        activation_checkpointing=(
            wanted, isinstance(wanted, (bool, str)) or all_are(wanted, str), "True, False, a name or names",
        ),
        offload_checkpoints=(
            on_host,
            not on_host or (on_host is True and bool(wanted)),
            "True or False, and False without activation_checkpointing",
        ),
        prefetch=(given["prefetch"], given["prefetch"] in get_args(Prefetch), '"none", "forward" or "both"'),
        bucket_mb=(bucket_mb, is_positive(bucket_mb) and isfinite(bucket_mb), "a size above 0"),
        shard_size=(shard_size, shard_size is None or is_count(shard_size, 1), "a number of ranks, 1 or more"),
        **{name: (given[name], isinstance(given[name], bool), "True or False") for name in _SWITCHES},
    )  # fmt: skip
