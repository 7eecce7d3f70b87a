"""Two claims on two CPU processes, each a ratio from one run of interleaved pairs.

    python benchmarks/pipeline_cpu.py [--pairs 30]

1. PipelineStrategy("1f1b") on 2 stages through Trainer.fit against torch.distributed.pipelining's Schedule1F1B in a
   bare loop: same GPT, same rows, 4 micro-batches, SGD. Bar 1.05.
2. PipelineStrategy on one stage against a plain single-device Trainer, same model and rows, one micro-batch. Bar 1.03.

CPU times are noisy: read the ratio and its quartiles, not the milliseconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.pairs import Interleave, Pairs
from benchmarks.torch_stage import TorchStage, token_loss
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks

MODEL = {
    "vocabulary": 256,
    "context": 128,
    "width": 256,
    "num_blocks": 8,
    "num_heads": 4,
    "tie_embeddings": False,
    "explicit_mask": False,
}
ROWS, MICROBATCHES = 8, 4


class BenchGPT(GPT):
    """The demo's GPT with plain SGD, as the peer has it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def make() -> BenchGPT:
    torch.manual_seed(0)
    return BenchGPT(**MODEL)


def rows() -> Tensor:
    return torch.randint(0, 256, (ROWS, MODEL["context"]), generator=torch.Generator().manual_seed(0))


def trainer(steps: int, strategy: object, devices: int, callbacks: list) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader(steps: int) -> DataLoader:
    return DataLoader([{"input_ids": rows()}] * steps, batch_size=None)


def torch_peer(module: LightningModule) -> Callable[[], None]:
    """One step of torch's 1F1B with its optimizer; stage s on rank s."""
    rank, world, batch = dist.get_rank(), dist.get_world_size(), rows()
    stage_module: nn.Module = TorchStage(make(), rank, world)
    stage = PipelineStage(stage_module, rank, world, torch.device("cpu"), group=dist.new_group(list(range(world))))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=token_loss)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*((batch,) if rank == 0 else ()), **({"target": batch} if rank == world - 1 else {}))
        optimizer.step()

    return step


def two_stages(rank: int, port: int, pairs: int) -> Pairs:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="benchmark",
    )
    interleave = Interleave(torch_peer, block=2, pairs=pairs, fence=dist.barrier)
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=MICROBATCHES, partition="count")
    trainer(interleave.steps, strategy, 2, [interleave]).fit(make(), loader(interleave.steps))
    return interleave.result


def one_stage(rank: int, pairs: int) -> Pairs:
    """Two Trainers in one process take turns, the plain one on a thread that runs only while ours waits for it."""
    turns = Turns()
    interleave = Interleave(lambda module: turns.take, block=2, pairs=pairs)
    plain = threading.Thread(target=lambda: plain_trainer(interleave.steps, turns), daemon=True)
    plain.start()
    trainer(interleave.steps, PipelineStrategy(num_microbatches=1), 1, [interleave]).fit(
        make(), loader(interleave.steps)
    )
    plain.join()
    return interleave.result


class Turns(Callback):
    """Lets the plain Trainer run one step each time `take` is called, and no further."""

    def __init__(self) -> None:
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)

    def take(self) -> None:
        self._mine.release()
        self._theirs.acquire()

    def on_train_start(self, *args: object) -> None:
        self._mine.acquire()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        self._theirs.release()
        if trainer.global_step < trainer.max_steps:
            self._mine.acquire()


def plain_trainer(steps: int, turns: Turns) -> None:
    trainer(steps, "auto", 1, [turns]).fit(make(), loader(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = run_ranks(two_stages, 2, free_port(), args.pairs, group=False, timeout=600)[1]
    print(result.report("2 stages: ours : torch Schedule1F1B", 1.05), flush=True)
    result = run_ranks(one_stage, 1, args.pairs, group=False, timeout=600)[0]
    print(result.report("1 stage : plain Trainer", 1.03), flush=True)


if __name__ == "__main__":
    main()
