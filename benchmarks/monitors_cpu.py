"""What CommunicationMonitor and MemoryMonitor cost beside a training step of ZeRO.

    python benchmarks/monitors_cpu.py [--steps 80] [--width 64] [--stage 2]

A GPT on two forked ranks; each monitor has a run of its own, in which every second step is logged, so that both kinds
of step meet the same machine. Told are, of medians over the steps: the callback's own time in a step that is not
logged, and what a logged step takes more, both as shares of the latter; and from these the share
at the Trainer's default of one logged step in 50, for which the bar is 0.01.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lightning_parallel import CommunicationMonitor, MemoryMonitor, ZeROStrategy
from lightning_parallel.cli.warnings import ignore_third_party_warnings
from lightning_parallel.demo import GPT, TextDataModule

HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")
EVERY, WARM_UP, BAR = 50, 10, 0.01


class Timed(Callback):
    """Stands in a monitor's place, calls it, and notes how long its hooks and each step took.

    Args:
        monitor: what is timed.
    """

    def __init__(self, monitor: Callback) -> None:
        self.monitor, self.own, self.steps, self._began = monitor, [0.0], [], 0.0

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda *args, **kwargs: self._time(name, *args, **kwargs)

    def _time(self, name: str, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        if name == "on_train_batch_start":
            self._began = start
        getattr(self.monitor, name)(*args, **kwargs)
        end = time.perf_counter()
        self.own[-1] += end - start
        if name == "on_train_batch_end":
            self.steps.append(end - self._began)
            self.own.append(0.0)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.monitor.on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.monitor.on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            self.report()

    def report(self) -> None:
        """Print the shares."""
        usual, logged = self.steps[WARM_UP::2], self.steps[WARM_UP + 1 :: 2]
        step, own = median(usual), median(self.own[WARM_UP:-1:2])
        more = max(0.0, median(logged) - step)
        share = ((EVERY - 1) * own + more) / EVERY / step
        print(
            f"{type(self.monitor).__name__}: step {1e3 * step:.1f} ms; the callback in a step that is not logged"
            f" {own / step:.5f} of it; a logged step {more / step:.3f} more; at one in {EVERY} {share:.5f} of a step,"
            f" bar {BAR} {'met' if share <= BAR else 'MISSED'}",
            flush=True,
        )


def main() -> None:
    """One run for each monitor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--stage", type=int, default=2)
    options = parser.parse_args()
    ignore_third_party_warnings()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    for monitor in (CommunicationMonitor(every_n_steps=2), MemoryMonitor(every_n_steps=2)):
        seed_everything(0, verbose=False)
        trainer = Trainer(
            accelerator="cpu", devices=2, max_steps=options.steps, callbacks=[Timed(monitor)],
            strategy=ZeROStrategy(stage=options.stage, start_method="fork"), enable_model_summary=False, **quiet,
        )  # fmt: skip
        trainer.fit(GPT(context=64, width=options.width, num_blocks=4), TextDataModule(context=64, batch_size=8))


if __name__ == "__main__":
    main()
