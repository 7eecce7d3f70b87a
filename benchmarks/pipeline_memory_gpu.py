"""What every schedule keeps for its backwards on a GPU, beside what it says, and the allocator's peak.

    torchrun --nproc-per-node 2 benchmarks/pipeline_memory_gpu.py [--schedules v_min v_half 1f1b] [--microbatches 12]

A GPT of 16 layers, width 2048, vocabulary 4096 in bf16, micro-batches of 2 x 2048 tokens, three steps of
`Trainer.fit` with `MemoryMonitor`, which measures the last. One block of three lines a schedule. Activations are
counted in what a rank's forwards save for one micro-batch, so that ranks with an embedding or a loss compare too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from datetime import datetime
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lightning_parallel.callbacks import MemoryMonitor
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import PipelineStrategy

MODEL = {"vocabulary": 4096, "context": 2048, "width": 2048, "num_blocks": 16, "num_heads": 16, "explicit_mask": False}
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "chimera", "dualpipe"]


def measure(schedule: str, microbatches: int) -> MemoryMonitor:
    """Three steps under a schedule; the last one's memory."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(**MODEL, tie_embeddings=False)
    tokens = torch.randint(0, MODEL["vocabulary"], (2 * microbatches, MODEL["context"]))
    monitor = MemoryMonitor(every_n_steps=3)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cuda", devices=int(os.environ["WORLD_SIZE"]), precision="bf16-true", max_steps=3, max_epochs=-1,
        strategy=PipelineStrategy(schedule=schedule, num_microbatches=microbatches, check_loss=False),
        callbacks=[monitor], use_distributed_sampler=False, **quiet,
    )  # fmt: skip
    trainer.fit(model, DataLoader([{"input_ids": tokens}] * 3, batch_size=None))
    return monitor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--microbatches", type=int, default=12)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    first = os.environ["RANK"] == "0"
    if first:
        print(f"{os.environ['WORLD_SIZE']} x {torch.cuda.get_device_name()}, torch {torch.__version__},", end=" ")
        print(f"{datetime.now():%Y-%m-%d}", flush=True)
    for schedule in args.schedules:
        monitor = measure(schedule, args.microbatches)
        if first:
            print(f"{schedule}\n{monitor.summary()}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
