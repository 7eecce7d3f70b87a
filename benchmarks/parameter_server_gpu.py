"""Workers of a parameter server on GPUs beside the same workers on CPUs: losses, and what a step takes.

    python benchmarks/parameter_server_gpu.py [--devices 2] [--steps 30] [--width 1024]

A perceptron trains on rows that every worker has the same of, under "bsp" and "ssp" (s = 3), with `update="server"` and
"worker". With "bsp" the losses of every step are those of CPU workers, to float32 rounding that grows with the steps;
with "ssp" and one worker, too; with several they depend on who comes first. Time is that of a step with the copies
between device and host in it; below the table stands that of one process on the device without servers.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lightning_parallel import ParameterServerStrategy

ROWS, CLASSES = 64, 10


class Perceptron(LightningModule):
    """Notes its losses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Keep(Callback):
    """Writes rank 0's losses, and the time of the later half of the steps, to a file."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.half = path, steps // 2

    def on_train_batch_end(self, trainer: Trainer, module: Any, *arguments: Any) -> None:
        if trainer.global_step == self.half:
            module.losses[-1].item()  # waits for the device
            self.began = time.perf_counter()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        losses = torch.stack(module.losses).cpu()
        seconds = (time.perf_counter() - self.began) / (len(losses) - self.half)
        if trainer.is_global_zero:
            torch.save({"losses": losses, "seconds": seconds}, self.path)


def fit(strategy: Any, accelerator: str, devices: int, steps: int, width: int) -> dict[str, Any]:
    """Losses of rank 0, and seconds a step."""
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(ROWS, 64, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
        for _ in range(steps)
    ]
    path = Path(tempfile.mkdtemp()) / "run.pt"
    trainer = Trainer(
        strategy=strategy, accelerator=accelerator, devices=devices, max_epochs=1, callbacks=[Keep(path, steps)],
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Perceptron(width), DataLoader(data, batch_size=None))
    found: dict[str, Any] = torch.load(path)
    return found


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="workers, each on a GPU of its own")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--accelerator", default="cuda", help="cpu: try the script itself")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = (arguments.steps, arguments.width)
    print(f"torch {torch.__version__}, {arguments.devices} workers, {arguments.steps} steps, width {arguments.width}")
    print("| rule | update | first and last loss, device | on CPU | largest difference | ms a step |")
    print("|---|---|---|---|---|---|")
    kinds: list[Literal["server", "worker"]] = ["server", "worker"]
    for consistency in ("bsp", "ssp"):
        for update in kinds:
            make = lambda rule=consistency, of=update: ParameterServerStrategy(rule, update=of)  # noqa: E731
            there = fit(make(), arguments.accelerator, arguments.devices, *size)
            here = fit(make(), "cpu", arguments.devices, *size)
            ours, theirs = there["losses"], here["losses"]
            most = float((ours - theirs).abs().max())
            print(
                f"| {consistency} | {update} | {ours[0]:.5f} {ours[-1]:.5f} | {theirs[0]:.5f} {theirs[-1]:.5f}"
                f" | {most:.1e} | {there['seconds'] * 1e3:.2f} |",
                flush=True,
            )
    # The only run in this process itself, and so the last: workers cannot be forked once CUDA is initialised.
    alone = fit("auto", arguments.accelerator, 1, *size)
    print(
        f"ALONE (one process, no servers): {alone['seconds'] * 1e3:.2f} ms a step, last loss {alone['losses'][-1]:.5f}"
    )


if __name__ == "__main__":
    main()
