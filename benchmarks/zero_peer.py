"""DeepSpeed's own loop as a peer of `zero_gpu.py`: its engine, its defaults, the same model, rows and optimizer.

It updates 32-bit copies always, so compare with `--masters`: `--compare 2:deepspeed --masters`. Its gradients
accumulate over the micro-batches of a step, divided by their number once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_parallel.zero.deepspeed.setup import connect_deepspeed, import_deepspeed


class DeepSpeedPeer:
    """A bare loop with DeepSpeed's engine.

    Args:
        make: builds the module, whose forward is its loss.
        stage: 1, 2 or 3.
        parts: this rank's micro-batches.
    """

    def __init__(self, make: Callable[[], nn.Module], stage: int, parts: list[Tensor]) -> None:
        device, local_rank = torch.device("cuda", torch.cuda.current_device()), int(os.environ["LOCAL_RANK"])
        deepspeed = import_deepspeed(device)
        ranks = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        connect_deepspeed(deepspeed, device, ranks)
        self.parts, module = parts, make().to(torch.bfloat16)
        self.engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=local_rank),
            model=module,
            optimizer=torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True),
            config={
                "train_micro_batch_size_per_gpu": parts[0].shape[0],
                "gradient_accumulation_steps": len(parts),
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 1 << 60,
            },
            dist_init_required=False,
        )
        self.model, self.optimizer = module, self.engine.basic_optimizer

    def step(self) -> None:
        """All micro-batches and one step of the optimizer."""
        for part in self.parts:
            self.engine.backward(self.engine(part))
            self.engine.step()
