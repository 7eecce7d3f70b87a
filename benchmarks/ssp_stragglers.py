"""What staleness buys and costs with stragglers: SSP, async, Downpour and DDP beside BSP and beside a virtual clock.

    python benchmarks/ssp_stragglers.py --out rows.jsonl      # every kind, three seeds; goes on where it was stopped
    python benchmarks/ssp_stragglers.py --table rows.jsonl    # prints what is there
    python benchmarks/ssp_stragglers.py --kinds transient --seeds 1 --steps 20 --unit-ms 10 --only ssp_3

Four workers train a perceptron on digits. A step lasts one unit, and is drawn longer: *transient*: 5 % of steps take 10
units more; *permanent*: worker 0 takes 4 units for every step; *extreme*: 10 % of steps take 40 units more. A step
sleeps, before its backward, for what its computation leaves of its time, so that a busy machine changes the ratios
little. Speed is steps of all workers by time; beside it stands what the recursion start[p][c] = max(end[p][c-1], all
ends of clock c-s-1) makes of the same draws. Loss is of the validation rows after the run, beside it how many standard
deviations of BSP's over seeds it is from BSP's mean; time to a loss is when the mean of the last 40 steps' losses, of
all workers, is below it. A number is a mean over seeds (of draws, weights and order of rows), with its standard
deviation.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.straggler_rows import Row, Rows, tables
from lightning_parallel import ParameterServerStrategy
from lightning_parallel.demo.digits import DigitsClassifier, DigitsDataModule

WORKERS = 4
WINDOW = 40
SETTINGS = {"transient": (150, 100.0), "permanent": (100, 100.0), "extreme": (100, 50.0)}  # steps, unit in ms
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

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began = time.monotonic()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = float(loss.detach())
        left = float(self.units[self.global_rank, self.trainer.global_step]) * self.unit
        time.sleep(max(0.0, self.began + left - time.monotonic()))
        return loss

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


def fit(part: Row) -> Row:
    """Train once."""
    seed_everything(part.seed, verbose=False)
    units = durations(part.kind, part.steps, part.seed)
    make, staleness = strategies()[part.name]
    module, data = Straggler(units, part.unit_ms / 1e3), DigitsDataModule(batch_size=16)
    path = Path(tempfile.mkdtemp()) / "runs.pt"
    trainer = Trainer(
        strategy=make(), devices=WORKERS, accelerator="cpu", max_steps=part.steps,
        callbacks=[Collect(path)],
        limit_val_batches=0, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    runs = torch.load(path)
    return replace(
        part,
        seconds=float(runs[..., 0].max()),
        promised=oracle(units, 0) / oracle(units, staleness),
        to_loss=time_to(part.wanted, runs.reshape(-1, 2)),
        loss=validation_loss(module, data),
        load=round(os.getloadavg()[0], 1),
        date=datetime.now().isoformat(" ", "minutes"),
    )


def time_to(wanted: float, steps: Tensor) -> float | None:
    """When the mean of the last losses of all workers' steps, shape (steps, 2), was below a number first."""
    steps = steps[steps[:, 0].argsort()]
    if len(steps) < WINDOW:
        return None
    below = (steps[:, 1].unfold(0, WINDOW, 1).mean(1) < wanted).nonzero()
    return float(steps[int(below[0]) + WINDOW - 1, 0]) if len(below) else None


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
        "ssp_1": (lambda: server("ssp", 1), 1),
        "ssp_3": (lambda: server("ssp", 3), 3),
        "ssp_10": (lambda: server("ssp", 10), 10),
        "async": (lambda: server("async"), None),
        "downpour_2_2": (lambda: server("downpour", n_push=2, n_fetch=2), None),
    }


def parts(arguments: argparse.Namespace) -> Iterator[Row]:
    """All runs that are asked for, seed by seed, so that what is there of a stopped benchmark can be compared."""
    names = [name for name in strategies() if not arguments.only or name in (*arguments.only, "bsp")]
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for kind in arguments.kinds:
            steps, unit_ms = arguments.steps or SETTINGS[kind][0], arguments.unit_ms or SETTINGS[kind][1]
            for name in names:
                yield Row(kind, steps, unit_ms, arguments.loss, name, seed)


def run(arguments: argparse.Namespace, rows: Rows) -> int:
    """Make the runs that are not in the file; how many failed."""
    failed, there = 0, {row.part for row in rows.read()}
    for part in parts(arguments):
        if part.part in there:
            continue
        try:
            row = fit(part)
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        rows.append(row)
        print(f"{part.kind}, seed {part.seed}, {part.name}: {row.seconds:.1f} s, load {row.load}", flush=True)
    return failed


def main() -> int:
    """Run, and print a table for every kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of rows, to go on from and to add to")
    parser.add_argument("--table", type=Path, help="print the tables of a file, and run nothing")
    parser.add_argument("--kinds", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--steps", type=int, help="of each worker; else that of the kind")
    parser.add_argument("--unit-ms", type=float, help="else that of the kind")
    parser.add_argument("--loss", type=float, default=0.35, help="time to which loss")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="how many, one after the other")
    parser.add_argument("--only", nargs="*", choices=list(strategies()), help="names of runs; bsp is one always")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = Rows(arguments.table or arguments.out or Path(tempfile.mkdtemp()) / "rows.jsonl")
    failed = 0 if arguments.table else run(arguments, rows)
    print("\n\n".join(tables(rows.read())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
