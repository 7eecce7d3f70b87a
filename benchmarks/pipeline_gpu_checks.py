"""What only GPUs can show: no device-to-host copy inside a step, the monitor's cost, validation, the end of a failure.

    torchrun --nproc-per-node 2 benchmarks/pipeline_gpu_checks.py

Prints one line a check; exits with 1 if one does not hold.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lightning_parallel.callbacks import BubbleMonitor, TimelineExporter
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.errors import StageError
from lightning_parallel.pipeline.runtime.engine import Engine
from lightning_parallel.strategies import PipelineStrategy

MODEL = {
    "vocabulary": 4096,
    "context": 1024,
    "width": 1024,
    "num_blocks": 8,
    "num_heads": 8,
    "tie_embeddings": True,
    "explicit_mask": False,
}
MONITOR_BAR = 0.01


class TimedMonitor(BubbleMonitor):
    """Adds up the host time of its own hook."""

    seconds, steps = 0.0, 0

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        began = time.perf_counter()
        super().on_train_batch_end(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        self.steps += 1


class CopiesOfAStep(Callback):
    """Profiles the engine in one training step and counts what the device copied to the host."""

    def __init__(self, step: int) -> None:
        self.step, self.copies, self.reads = step, -1, -1
        self._run = Engine.run

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx == self.step:
            Engine.run = self._profiled  # type: ignore[method-assign]

    def _profiled(self, *args: object) -> object:
        Engine.run = self._run  # type: ignore[method-assign]
        engine = trainer_engine(self)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            results = self._run(engine, *args)
            torch.cuda.synchronize()
        names = [event.name for event in profiler.events()]
        self.copies = sum(
            "DtoH" in name or "Device -> Pageable" in name or "Device -> Pinned" in name for name in names
        )
        self.reads = sum(name in ("aten::item", "aten::_local_scalar_dense", "aten::nonzero") for name in names)
        self.kernels = len(names)
        return results

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer


def trainer_engine(callback: CopiesOfAStep) -> Engine:
    return callback.trainer.strategy.pipeline.engine  # type: ignore[attr-defined]


def make(cls: type[GPT] = GPT) -> GPT:
    torch.manual_seed(0)
    return cls(**MODEL)


def loader(steps: int) -> DataLoader:
    tokens = torch.randint(0, 4096, (8, 1024), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": tokens}] * steps, batch_size=None, pin_memory=True)


def trainer(steps: int, callbacks: list[Callback], folder: str) -> Trainer:
    return Trainer(
        accelerator="cuda",
        devices=int(os.environ["WORLD_SIZE"]),
        precision="bf16-mixed",
        max_steps=steps,
        max_epochs=-1,
        strategy=PipelineStrategy(num_microbatches=8),
        callbacks=callbacks,
        logger=CSVLogger(folder),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit_and_validate(folder: str) -> bool:
    monitor, copies = TimedMonitor(), CopiesOfAStep(7)
    timeline = TimelineExporter(dirpath=os.path.join(os.environ.get("OUT", folder), "timeline"), every_n_steps=20)
    began = {}

    class StepTime(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, module: LightningModule, batch: object, batch_idx: int
        ) -> None:
            if batch_idx in (10, 40):
                torch.cuda.synchronize()
                began[batch_idx] = time.perf_counter()

    run, module = trainer(41, [monitor, timeline, copies, StepTime()], folder), make()
    run.fit(module, loader(41))
    step = (began[40] - began[10]) / 30
    share = monitor.seconds / monitor.steps / step
    rank = int(os.environ["RANK"])
    print(
        f"rank {rank}: copies to the host inside a step {copies.copies}, reads {copies.reads} (of {copies.kernels}"
        " events)",
        flush=True,
    )
    print(
        f"rank {rank}: BubbleMonitor {1e6 * monitor.seconds / monitor.steps:.0f} us a step, {share:.2%} of"
        f" {1e3 * step:.1f} ms",
        flush=True,
    )
    if rank == 0:
        print(monitor.summary(), flush=True)
    [metrics] = run.validate(module, loader(2), verbose=False)
    print(f"rank {rank}: validate after fit gives {metrics}", flush=True)
    return copies.copies == 0 and copies.reads == 0 and share <= MONITOR_BAR


class Fails(GPT):
    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        strategy = self.trainer.strategy
        if batch_idx == 2 and strategy.stage == 0 and strategy.pipeline.engine.executors[0, 0].holds:
            raise ValueError("the user's own text")
        return super().training_step(batch, batch_idx)


def fail(folder: str) -> bool:
    began = time.perf_counter()
    try:
        trainer(5, [], folder).fit(make(Fails), loader(5))
    except StageError as error:
        took = time.perf_counter() - began
        print(
            f"rank {os.environ['RANK']}: ended after {took:.1f} s with {type(error.__cause__).__name__}: {error}",
            flush=True,
        )
        return isinstance(error.__cause__, ValueError) and took < 30
    return False


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with tempfile.TemporaryDirectory() as folder:
        held = [fit_and_validate(folder), fail(folder)]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
