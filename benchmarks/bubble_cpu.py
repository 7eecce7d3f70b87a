"""The measured bubble of every schedule beside its formula, on CPU processes.

    python benchmarks/bubble_cpu.py [--ranks 4] [--microbatches 8] [--steps 30] [--block-ms 10] [--schedules zb_v ...]

By default a block sleeps, 10 ms in its forward, 10 ms for its input's gradient and 10 ms for its weight's, in place of
computing: as many ranks as one likes then fit on any number of cores, and what is left beside the formula is what the
engine and the transfers add. With --block-ms 0 the blocks of a GPT compute, which needs a core for each rank.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import BubbleMonitor, PipelineStrategy
from lightning_parallel.demo import GPT
from lightning_parallel.pipeline.schedules import SCHEDULES
from lightning_parallel.strategies.registry import STRINGS

RUN = [name for name in SCHEDULES if f"pipeline_{name}" in STRINGS]


class Pause(torch.autograd.Function):
    """Sleeps, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class PausingBlock(nn.Linear):
    """A small layer that takes a while: as long for its weight's gradient (in B or in W) as for its input's."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds
        self.weight.register_hook(lambda gradient: time.sleep(seconds))

    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(super().forward(x), self.seconds)


class Pausing(LightningModule):
    """Such blocks, one behind the other."""

    def __init__(self, num_blocks: int, seconds: float, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[PausingBlock(width, seconds) for _ in range(num_blocks)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(schedule: str, args: argparse.Namespace) -> None:
    """One run; prints what `BubbleMonitor` has to say about it."""
    seed_everything(0, verbose=False)
    if args.block_ms:
        module: LightningModule = Pausing(2 * args.ranks, 1e-3 * args.block_ms)
        batch: Tensor | dict[str, Tensor] = torch.randn(2 * args.microbatches, 64)
    else:
        module = GPT(width=256, num_blocks=4 * args.ranks, tie_embeddings=False)
        batch = {"input_ids": torch.randint(0, 256, (2 * args.microbatches, 128))}
    monitor = BubbleMonitor(every_n_steps=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=PipelineStrategy(schedule=schedule, num_microbatches=args.microbatches, partition="count"),
        max_steps=args.steps,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch] * args.steps, batch_size=None))
    if trainer.is_global_zero:
        print(monitor.summary(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", "--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--block-ms", type=float, default=10.0)
    parser.add_argument("--schedules", nargs="+", default=RUN)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for schedule in args.schedules:
        measure(schedule, args)


if __name__ == "__main__":
    main()
