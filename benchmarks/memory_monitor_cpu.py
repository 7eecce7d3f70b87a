"""What MemoryMonitor costs: in steps that it does not log, and in those that it does.

    python benchmarks/memory_monitor_cpu.py [--steps 60] [--width 128]

One run of a GPT in one process, logged in every second step, so that both kinds of step meet the same machine. Ratios
are of medians: the callback's own time in a step that is not logged over the time of such a step, and the time of a
logged step over that of one that is not.
"""

from __future__ import annotations

import argparse
import logging
import time
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_parallel import MemoryMonitor
from lightning_parallel.cli.warnings import ignore_third_party_warnings
from lightning_parallel.demo import GPT, TextDataModule


class Timed(MemoryMonitor):
    """Knows how long its own hooks took in each step, and each step from its start to its end."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=2)
        self.own: list[float] = []
        self.steps: list[float] = []
        self._began = self._entered = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = time.perf_counter()
        super().on_train_batch_start(*args)
        self._entered = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        left = time.perf_counter()
        super().on_train_batch_end(*args)
        now = time.perf_counter()
        self.own.append(self._entered - self._began + now - left)
        self.steps.append(now - self._began)


def main() -> None:
    """Run, and print both ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    ignore_third_party_warnings()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    monitor = Timed()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=options.steps, callbacks=[monitor], enable_model_summary=False, **quiet
    )
    trainer.fit(GPT(width=options.width), TextDataModule(batch_size=16))
    usual, logged = monitor.steps[10::2], monitor.steps[11::2]
    print(
        f"step not logged: {median(usual) * 1e3:.2f} ms, of it the callback {median(monitor.own[10::2]) * 1e6:.0f} us"
    )
    print(f"callback / step that is not logged: {median(monitor.own[10::2]) / median(usual):.5f}")
    print(f"logged step / step that is not:     {median(logged) / median(usual):.3f}")
    print(monitor.summary())


if __name__ == "__main__":
    main()
