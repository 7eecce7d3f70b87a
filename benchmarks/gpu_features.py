"""Every feature on GPUs: three losses of a small model beside those of plain 1F1B on the same GPUs.

    torchrun --nproc-per-node 2 benchmarks/gpu_features.py [--only SUBSTRING ...]

Prints one line a feature; exits with 1 if a difference is larger than rounding. Features that do not fit the number of
GPUs are left out, and named.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lightning_parallel.callbacks import MemoryMonitor
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import HybridStrategy, PipelineStrategy

WORLD = int(os.environ.get("WORLD_SIZE", 1))
ACCELERATOR = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"vocabulary": 64, "context": 32, "width": 256, "num_blocks": 8, "num_heads": 2, "tie_embeddings": True}


class Small(GPT):
    """With an example, a metric and plain SGD, which shows a wrong scale as it is."""

    def __init__(self) -> None:
        super().__init__(**SMALL)
        self.example_input_array = torch.zeros(2, 32, dtype=torch.int64)
        self.mean = MeanMetric()

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", self.mean(loss.detach()), on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *args: object) -> None:
        self.seen.append(float(outputs["loss"]))


class Twice(Small):
    """Calls its model twice a step, on the rows and on the rows backwards."""

    def _loss(self, batch: dict) -> torch.Tensor:
        forth, back = super()._loss(batch), super()._loss({"input_ids": batch["input_ids"].flip(1)})
        return (forth + back) / 2


class Case(NamedTuple):
    """A strategy's arguments beside those that all have.

    Args:
        options: of the strategy.
        gpus: how many it needs, 0 for any number.
        module: what is trained.
        strategy: its class.
        precision: of the Trainer.
        save: whether a fourth step goes on from a checkpoint.
    """

    options: dict[str, Any]
    gpus: int = 0
    module: type[Small] = Small
    strategy: Any = PipelineStrategy
    precision: str = "32"
    save: bool = False


def losses_of(case: Case, folder: str) -> list[float]:
    """Three steps of the small model, and a fourth from a checkpoint."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(1))
    losses = Losses()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)

    def run(steps: int) -> Trainer:
        strategy = case.strategy(**{"num_microbatches": 4, "check_loss": False, **case.options})
        callbacks = [losses, MemoryMonitor(every_n_steps=2)]
        return Trainer(
            accelerator=ACCELERATOR, devices=WORLD, precision=case.precision, max_steps=steps, max_epochs=-1,
            strategy=strategy, callbacks=callbacks, use_distributed_sampler=False, **quiet,
        )  # fmt: skip

    data = DataLoader([{"input_ids": tokens}] * 4, batch_size=None)
    first = run(3)
    first.fit(case.module(), data)
    if case.save:
        path = os.path.join(folder, "saved.ckpt")
        first.save_checkpoint(path)
        run(4).fit(case.module(), data, ckpt_path=path)
    return losses.seen


def hybrid(data: int, pipeline: int, tensor: int, zero: int = 0, schedule: str = "1f1b", **options: Any) -> Case:
    sizes = {"data_parallel_size": data, "pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}
    return Case(
        {**sizes, "zero_stage": zero, "schedule": schedule, **options}, data * pipeline * tensor, Small, HybridStrategy
    )


FEATURES: dict[str, Case] = {
    "recompute block": Case({"recompute": "block"}),
    "recompute stage": Case({"recompute": "stage"}),
    "skip connections": Case({"skip_connections": True}),
    "dynamic shapes": Case({"dynamic_shapes": True}),
    "two copies": Case({"data_parallel_size": 2}),
    "two copies, graphs": Case({"data_parallel_size": 2, "cuda_graphs": True}),
    "two copies, ZB-V, graphs": Case({"data_parallel_size": 2, "cuda_graphs": True, "schedule": "zb_v"}, 4),
    "partition by time": Case({"partition": "time"}),
    "schedule auto": Case({"schedule": "auto"}),
    "ZB-V": Case({"schedule": "zb_v"}),
    "V-Min with graphs": Case({"schedule": "v_min", "cuda_graphs": True}),
    "interleaved, graphs": Case({"schedule": "interleaved_1f1b", "cuda_graphs": True}),
    "Chimera": Case({"schedule": "chimera"}),
    "Chimera, doubling": Case({"schedule": "chimera:doubling=true", "num_microbatches": 8}),
    "DualPipe": Case({"schedule": "dualpipe"}),
    "GEMS": Case({"schedule": "gems"}),
    "DualPipe with graphs": Case({"schedule": "dualpipe", "cuda_graphs": True}),
    "sharded checkpoint": Case({"state_dict_type": "sharded"}, save=True),
    "16-mixed": Case({}, precision="16-mixed"),
    "called twice": Case({}, module=Twice),
    "called twice, graphs": Case({"cuda_graphs": True}, module=Twice),
    "called twice, ZB-V": Case({"schedule": "zb_v"}, module=Twice),
    "called twice, Chimera": Case({"schedule": "chimera"}, module=Twice),
    **{f"hybrid 2 x 1 x 1, ZeRO {z}": hybrid(2, 1, 1, z) for z in (1, 2, 3)},
    "hybrid 1 x 1 x 2": hybrid(1, 1, 2),
    "hybrid 1 x 1 x 2, sequence parallel": hybrid(1, 1, 2, sequence_parallel=True),
    "hybrid 1 x 2 x 1, ZB-V": hybrid(1, 2, 1, 0, "zb_v"),
    **{f"hybrid 2 x 2 x 1, ZeRO {z}, ZB-V": hybrid(2, 2, 1, z, "zb_v") for z in (1, 2, 3)},
    "hybrid 1 x 2 x 2, ZB-V": hybrid(1, 2, 2, 0, "zb_v"),
    "hybrid 2 x 1 x 2, ZeRO 3": hybrid(2, 1, 2, 3),
}


def compare(names: list[str], folder: str) -> bool:
    """Every feature's losses beside those of plain 1F1B on all GPUs."""
    held, plain = True, {module: losses_of(Case({}, module=module), folder) for module in (Small, Twice)}
    for name in names:
        case = FEATURES[name]
        if case.gpus not in (0, WORLD):
            say(f"{name}: needs {case.gpus} GPUs, not {WORLD}")
            continue
        if case.options.get("cuda_graphs") and ACCELERATOR != "cuda":
            say(f"{name}: needs GPUs")
            continue
        seen = losses_of(case, folder)
        difference = max(abs(a - b) for a, b in zip(seen, plain[case.module], strict=False))
        held &= difference < (2e-2 if "16" in case.precision else 1e-4)
        say(f"{name}: largest difference of {len(seen)} losses from 1F1B's {difference:.2e}")
    return held


def say(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="features whose name has one of these in it")
    only = parser.parse_args().only
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if ACCELERATOR == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    folder = Path(tempfile.gettempdir()) / f"gpu_features_{os.getppid()}"  # of this launch's ranks
    try:
        held = compare([name for name in FEATURES if any(part in name for part in only)], str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(not held)


if __name__ == "__main__":
    main()
