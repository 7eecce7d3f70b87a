"""What the benchmarks on GPUs share: the model, the Trainer and where ranks run."""

from __future__ import annotations

import argparse
import os

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel.demo.gpt import GPT


class BenchGPT(GPT):
    """The demo's GPT with AdamW in one fused kernel, as the peer has it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def make_model(hparams: dict, cls: type[GPT] = GPT) -> GPT:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return cls(**hparams)


def repeat(batch: dict[str, Tensor], steps: int) -> DataLoader:
    return DataLoader([batch] * steps, batch_size=None, pin_memory=True)


def trainer(devices: int, steps: int, precision: str, strategy: object, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        accelerator="cuda",
        devices=devices,
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        use_distributed_sampler=False,
    )


def hparams_of(length: int, args: argparse.Namespace) -> dict:
    return {
        "vocabulary": args.vocabulary,
        "context": length,
        "width": args.width,
        "num_blocks": args.layers,
        "num_heads": args.width // 128,
        "tie_embeddings": False,
        "explicit_mask": False,
    }


def bind_to_cores() -> None:
    """Give each rank of this host cores of its own: threads that move between cores scatter host-bound times."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // int(os.environ["LOCAL_WORLD_SIZE"])
    first = share * int(os.environ["LOCAL_RANK"])
    if share > 1:
        os.sched_setaffinity(0, cores[first : first + share])
