"""One GPU and its host's memory train a model whose states are 1.5 times what the GPU holds.

    python benchmarks/zero_gpu.py --offload [--card-gib 40] [--times 1.5] [--width 4096] [--steps 2]
    python benchmarks/zero_offload.py --cpu --card-gib 0.01 --width 64      # the same path without a GPU

The model is sized from the card: stage 3 with `offload` keeps 16 bytes a parameter on the host (32-bit parameters and
gradients, Adam's moments), and gathers a block at a time in 16 bits. --card-gib caps what PyTorch may take of the card,
so that a smaller host is enough; the host needs --times as much beside what the system takes. Printed are bytes of
states, of the card, the peak on it, and the losses.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.measure.storages import tensors_in
from lightning_parallel.strategies import ZeROStrategy
from lightning_parallel.zero.accounting import StateBytes

STATES = StateBytes(parameters=4, gradients=4, optimizer=8)
VOCABULARY, LENGTH = 32000, 512


def blocks_for(nbytes: float, width: int, vocabulary: int) -> int:
    """Blocks of the smallest GPT whose states take so many bytes."""
    outside = (vocabulary + LENGTH + 2) * width
    block = sum(
        p.numel() for p in GPT(vocabulary=2, width=width, num_blocks=1, num_heads=width // 64).blocks.parameters()
    )
    return max(1, -int(-(nbytes / STATES.total - outside) // block))


class Watch(Callback):
    """Losses, seconds, and the states' bytes at the end of a step, as they lie in memory."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.states = 0

    def on_train_batch_start(self, *args: object) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: dict, *args: object) -> None:
        self.losses.append(float(outputs["loss"]))
        self.seconds.append(time.perf_counter() - self._began)
        parameters = [p for p in pl_module.parameters() if isinstance(p, DTensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = tensors_in([list(o.state.values()) for o in trainer.optimizers])
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (*parameters, *gradients, *states)]
        self.states = sum(t.nbytes for t in local)


def card_bytes(args: argparse.Namespace) -> float:
    """What PyTorch may take of the card, capped if asked for."""
    if args.cpu:
        return (args.card_gib or 0.01) * 2**30
    total = torch.cuda.get_device_properties(0).total_memory
    if args.card_gib is None:
        return total
    torch.cuda.set_per_process_memory_fraction(args.card_gib * 2**30 / total)
    return args.card_gib * 2**30


def offload(args: argparse.Namespace) -> None:
    """Train, and print."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    card = card_bytes(args)
    torch.manual_seed(0)
    vocabulary = 256 if args.cpu else VOCABULARY
    model = GPT(
        vocabulary=vocabulary, context=LENGTH, width=args.width, num_heads=args.width // 64, explicit_mask=False,
        num_blocks=blocks_for(args.times * card, args.width, vocabulary),
    )  # fmt: skip
    tokens = torch.randint(0, vocabulary, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu" if args.cpu else "cuda", devices=1, max_steps=args.steps, precision="bf16-true",
        strategy=ZeROStrategy(stage=3, offload=True, activation_checkpointing=True), callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters())
    trainer.fit(model, DataLoader([{"input_ids": tokens}] * args.steps, batch_size=None))
    peak = "not measured" if args.cpu else f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    print(
        f"{parameters / 1e9:.3f} billion parameters; states {watch.states / 2**30:.3f} GiB (formula"
        f" {parameters * STATES.total / 2**30:.3f}); card {card / 2**30:.3f} GiB, states / card"
        f" {watch.states / card:.2f}; peak on the card {peak}; losses"
        f" {', '.join(f'{loss:.4f}' for loss in watch.losses)};"
        f" seconds a step {', '.join(f'{s:.1f}' for s in watch.seconds)}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--card-gib", type=float, help="let PyTorch take no more of the card")
    parser.add_argument("--times", type=float, default=1.5, help="states over card")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="the same path without a GPU")


if __name__ == "__main__":
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(own)
    own.add_argument("--width", type=int, default=4096)
    offload(own.parse_args())
