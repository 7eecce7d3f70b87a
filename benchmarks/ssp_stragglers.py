"""What staleness buys and costs with stragglers: SSP, async, Downpour and DDP beside BSP and beside a virtual clock.

    python benchmarks/ssp_stragglers.py [--kind transient|permanent|extreme] [--steps 150] [--unit-ms 50] [--seeds 5]

Four workers train a perceptron on digits. A step lasts one unit, and is drawn longer: *transient*: 5 % of steps take 10
units more; *permanent*: worker 0 takes 4 units for every step; *extreme*: 10 % of steps take 40 units more. A step
sleeps for what its computation leaves of its time, so that a busy machine changes the ratios little. Speed is steps of
all workers by time; beside it stands what the recursion start[p][c] = max(end[p][c-1], all ends of clock c-s-1) makes
of the same draws. Loss is of the validation rows after the run; time to a loss is when the mean of the last 40 steps'
losses, of all workers, is below it. With several seeds (of draws, weights and order of rows) each number is a mean,
with its standard deviation.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_parallel import ParameterServerStrategy
from lightning_parallel.demo.digits import DigitsClassifier, DigitsDataModule

WORKERS = 4
WINDOW = 40
Draw = Tensor  # shape (workers, steps), units


def durations(kind: str, steps: int, seed: int) -> Draw:
    """How long every step lasts, in units."""
    drawn = torch.rand(WORKERS, steps, generator=torch.Generator().manual_seed(seed))
    units = torch.ones(WORKERS, steps)
    if kind == "permanent":
        units[0] = 4.0
        return units
    share, more = (0.05, 10.0) if kind == "transient" else (0.10, 40.0)
    return units + more * (drawn < share)


def oracle(units: Draw, staleness: int | None) -> float:
    """When the last worker ends on a virtual clock on which nothing but steps takes time."""
    workers, steps = units.shape
    ends, all_done = torch.zeros(workers), [0.0]
    for clock in range(steps):
        gate = 0.0 if staleness is None or clock <= staleness else all_done[clock - staleness]
        ends = ends.clamp(min=gate) + units[:, clock]
        all_done.append(float(ends.max()))
    return all_done[-1]


class Straggler(DigitsClassifier):
    """Its steps last as long as they were drawn."""

    def __init__(self, units: Draw, unit: float) -> None:
        super().__init__(width=64, num_layers=3)
        self.units, self.unit = units, unit
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = float(loss.detach())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began = time.monotonic()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        left = float(self.units[self.global_rank, self.trainer.global_step]) * self.unit
        time.sleep(max(0.0, self.began + left - time.monotonic()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((time.monotonic(), self.last))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Collect(Callback):
    """Writes every worker's times and losses to a file, which rank 0 does under any launcher."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        trainer.strategy.barrier("start")
        self.began = time.monotonic()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        own = torch.tensor([[moment - self.began, loss] for moment, loss in module.seen], dtype=torch.float64)
        runs = module.all_gather(own)
        if trainer.is_global_zero:
            torch.save(runs, self.path)


@dataclass
class Outcome:
    """Of one run."""

    seconds: float
    to_loss: float | None
    loss: float


def fit(strategy: Any, units: Draw, unit: float, wanted: float, seed: int) -> Outcome:
    """Train once."""
    seed_everything(seed, verbose=False)
    module, data = Straggler(units, unit), DigitsDataModule(batch_size=16)
    path = Path(tempfile.mkdtemp()) / "runs.pt"
    trainer = Trainer(
        strategy=strategy, devices=WORKERS, accelerator="cpu", max_steps=units.shape[1],
        callbacks=[Collect(path)],
        limit_val_batches=0, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    runs = torch.load(path)
    steps = runs.reshape(-1, 2)[runs[..., 0].reshape(-1).argsort()]
    means = steps[:, 1].unfold(0, WINDOW, 1).mean(1)
    below = (means < wanted).nonzero()
    reached = float(steps[int(below[0]) + WINDOW - 1, 0]) if len(below) else None
    return Outcome(float(runs[..., 0].max()), reached, validation_loss(module, data))


@torch.no_grad()
def validation_loss(module: Straggler, data: DigitsDataModule) -> float:
    data.setup("fit")
    x, y = data.validation.tensors
    return float(torch.nn.functional.cross_entropy(module.eval().cpu()(x), y))


def strategies() -> dict[str, tuple[Any, int | None]]:
    """Name -> (makes the strategy, staleness on the virtual clock)."""
    server = ParameterServerStrategy
    return {
        "bsp": (lambda: server("bsp"), 0),
        "ddp": (lambda: DDPStrategy(start_method="fork", process_group_backend="gloo"), 0),
        "ssp 1": (lambda: server("ssp", 1), 1),
        "ssp 3": (lambda: server("ssp", 3), 3),
        "ssp 10": (lambda: server("ssp", 10), 10),
        "async": (lambda: server("async"), None),
        "downpour 2/2": (lambda: server("downpour", n_push=2, n_fetch=2), None),
    }


def rounds(arguments: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, Row]]:
    """Every run with every seed: its name, and its numbers beside those of that seed's BSP."""
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        units = durations(arguments.kind, arguments.steps, seed)
        found: dict[str, Outcome] = {}
        for name in [*names, "bsp"]:  # BSP twice, since all else is compared with it
            again = fit(strategies()[name][0](), units, arguments.unit_ms / 1e3, arguments.loss, seed)
            print(f"seed {seed}, {name}: {again.seconds:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            found[name] = min(again, found.get(name, again), key=lambda outcome: outcome.seconds)
        for name, outcome in found.items():
            speed = found["bsp"].seconds / outcome.seconds
            promised = oracle(units, 0) / oracle(units, strategies()[name][1])
            step = outcome.seconds / arguments.steps
            yield name, Row(step, speed, promised, speed / promised - 1, outcome.to_loss, outcome.loss)


class Row(NamedTuple):
    """Of one run with one seed."""

    step: float  # seconds
    speed: float  # times BSP's
    promised: float  # by the virtual clock
    off: float
    to_loss: float | None  # seconds
    loss: float


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean and sample standard deviation; how many there are where some are missing.

    Example:
        >>> spread([1.0, 3.0], ".1f"), spread([2.0, None], ".1f"), spread([None], ".1f")
        ('2.0 ± 1.4', '2.0 (1 of 2)', '-')
    """
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    text = format(mean(there), form)
    if len(there) > 1:
        text += f" ± {format(stdev(there), form).lstrip('+')}"
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)})"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("transient", "permanent", "extreme"), default="transient")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--unit-ms", type=float, default=50.0)
    parser.add_argument("--loss", type=float, default=0.35, help="time to which loss")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--only", nargs="*", help="names of runs")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{arguments.kind}, {WORKERS} workers, {arguments.steps} steps, unit {arguments.unit_ms} ms, seeds", end=" ")
    print(f"{arguments.seed} to {arguments.seed + arguments.seeds - 1}, load {os.getloadavg()[0]:.1f}")
    names = [name for name in strategies() if not arguments.only or name in (*arguments.only, "bsp")]
    rows: dict[str, list[Row]] = {}
    for name, row in rounds(arguments, names):
        rows.setdefault(name, []).append(row)
    print("| run | s/step | x BSP | virtual clock | off by | s to loss | final loss |\n|---|---|---|---|---|---|---|")
    for name, of in rows.items():
        columns = zip(zip(*of, strict=True), (".4f", ".2f", ".2f", "+.1%", ".1f", ".3f"), strict=True)
        print(f"| {name} | {' | '.join(spread(values, form) for values, form in columns)} |")


if __name__ == "__main__":
    main()
