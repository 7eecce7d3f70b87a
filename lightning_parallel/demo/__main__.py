"""``make demo``: two small models train as pipelines of 4 CPU processes, the bubble measured beside its formula.

Each model is a run of its own (``python -m lightning_parallel.demo digits``), so that each may start its processes.
"""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

OUTPUT = Path("demo_output")
STAGES, MICROBATCHES = 4, 8
RUNS = {
    "digits": "a perceptron of 8 layers reads handwritten digits",
    "gpt": "a GPT of 8 blocks learns English, byte by byte, from Python's own manual",
}


def main(arguments: list[str]) -> int:
    """Run the named demos, or all of them, and return the exit status."""
    if not arguments:
        return _run_all()
    (name,) = arguments
    if name not in RUNS:
        print(f"There is no demo {name!r}; there are {', '.join(RUNS)}.", file=sys.stderr)
        return 2
    train(name)
    return 0


def train(name: str) -> None:
    """Train one model in this process and the three that the strategy starts."""
    import torch
    from lightning.pytorch import Trainer, seed_everything

    from lightning_parallel.callbacks import BubbleMonitor, TimelineExporter
    from lightning_parallel.cli.warnings import ignore_third_party_warnings
    from lightning_parallel.strategies import PipelineStrategy

    ignore_third_party_warnings()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    model, data, length = _pieces(name)
    bubble = BubbleMonitor()
    timeline = TimelineExporter(dirpath=OUTPUT / name, every_n_steps=1000)  # the last step always
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=MICROBATCHES)
    trainer = Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=strategy,
        callbacks=[bubble, timeline],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **length,
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"\n{bubble.summary()}")
        losses = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
        print("\n" + "   ".join(f"{key} {value:.3f}" for key, value in losses.items()))


def _pieces(name: str) -> tuple:
    from lightning_parallel.demo import GPT, DigitsClassifier, DigitsDataModule, TextDataModule

    if name == "digits":
        return DigitsClassifier(width=256, num_layers=8), DigitsDataModule(batch_size=128), {"max_epochs": 8}
    model = GPT(context=64, width=64, num_blocks=8, learning_rate=1e-3)
    length = {"max_epochs": 1, "limit_train_batches": 120, "limit_val_batches": 8}
    return model, TextDataModule(context=64, batch_size=32), length


def _run_all() -> int:
    began = time.monotonic()
    formula = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    print(f"{STAGES} CPU processes, one stage each; schedule 1F1B with {MICROBATCHES} micro-batches a step.")
    print(f"Bubble by the formula (D-1)/(M+D-1), where every stage costs the same: {formula:.1%}.")
    if (cores := os.cpu_count() or 1) < STAGES:
        print(f"This machine has {cores} cores for them: waiting for a core counts as bubble too, so expect more.")
    for name, what in RUNS.items():
        print(f"\n== {name}: {what}\n", flush=True)
        status = subprocess.run([sys.executable, "-m", "lightning_parallel.demo", name]).returncode
        if status:
            return status
    written = "\n".join(f"  {path}" for path in sorted(OUTPUT.rglob("*")) if path.is_file())
    print(f"\nWritten (open the traces at https://ui.perfetto.dev):\n{written}")
    print(f"Done in {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
