"""Ours through Trainer.fit against torch's own tools in a bare loop, layout by layout, same GPUs, one run.

    torchrun --nproc-per-node 2 benchmarks/hybrid_gpu.py
        [--layouts tp dp-zero3 pp] [--tokens 4x2048] [--pairs 20] [--lightning]

A GPT of 32 layers, width 2048, vocabulary 32000 in bf16, AdamW, 8 micro-batches over all GPUs. `HybridStrategy` with
all GPUs along one axis: `tp` beside DTensor's plan with a parallel loss, `dp-zero3` beside FSDP2 with reshard (ours
gathers for every micro-batch too and reduces gradients once a step; `dp-zero3-step` gathers once a step;
`dp-zero3-batches` accumulates Lightning's batches, each of which it reduces as the bare loop does), `pp` beside torch's
1F1B. With --lightning it is Lightning's ModelParallelStrategy beside the same bare loops, in a process of its own.
Beside the ratio: our peak memory on the fullest GPU, states included, and what the formula gives for the states.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu_runs import BenchGPT, bind_to_cores, hparams_of, make_model, trainer
from benchmarks.hybrid_peers import LAYOUTS, ByLightning, WithLoss, loop_step
from benchmarks.pairs import synchronize
from benchmarks.torch_peer import torch_peer
from benchmarks.zero_gpu import StepInterleave
from lightning_parallel.strategies import HybridStrategy

BAR = 1.02
Step = Callable[[], None]


class States(Callback):
    """Of our last step: peak memory less what the peer holds, and the formula's bytes of states, fullest rank."""

    def __init__(self) -> None:
        self.peak, self.formula, self.others = 0.0, 0.0, 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.others = -torch.cuda.memory_allocated()

    def others_are_made(self) -> None:
        self.others += torch.cuda.memory_allocated()

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == trainer.max_steps - 1:
            synchronize()
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step < trainer.max_steps:
            return
        states = getattr(trainer.strategy, "model_states", lambda: None)()
        formula = 0.0 if states is None else sum(kind.formula for kind in states.kinds.values())
        both = torch.tensor([torch.cuda.max_memory_allocated() - self.others, float(formula)])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        self.peak, self.formula = both.tolist()


class Comparison:
    """One layout at one size of micro-batch."""

    def __init__(self, layout: str, shape: str, args: argparse.Namespace) -> None:
        self.layout, self.args = layout, args
        self.rows, self.length = map(int, shape.split("x"))
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.hparams, self.states = hparams_of(self.length, args), States()
        every = torch.randint(
            0, args.vocabulary, (self.rows * args.microbatches, self.length), generator=torch.Generator().manual_seed(0)
        )
        parts = list(every.chunk(args.microbatches))
        self.parts = parts[self.rank :: self.world] if layout.startswith("dp") else parts

    @property
    def kind(self) -> str:
        """The layout of the bare loop."""
        return self.layout.removesuffix("-step").removesuffix("-batches")

    @property
    def batches(self) -> int:
        """How many batches of Lightning's make a step."""
        return len(self.parts) if self.layout.endswith("-batches") else 1

    def strategy(self) -> HybridStrategy:
        options = {"num_microbatches": len(self.parts) // self.batches, "check_loss": False}
        if self.layout == "tp":
            return HybridStrategy(data_parallel_size=1, tensor_parallel_size=self.world, **options)
        if self.layout == "pp":
            graphs = {"cuda_graphs": self.args.cuda_graphs, "schedule": self.args.schedule}
            return HybridStrategy(data_parallel_size=1, pipeline_parallel_size=self.world, **graphs, **options)
        gather = "step" if self.layout.endswith("step") else "microbatch"
        return HybridStrategy(data_parallel_size=self.world, zero_stage=3, gather=gather, **options)

    def make_loop(self, module: LightningModule | None = None) -> Step:
        """The bare loop's step on this rank."""
        parts = [part.cuda() for part in self.parts]
        if self.kind == "pp":
            make = partial(make_model, self.hparams)
            step = torch_peer(make, "1f1b", torch.cat(parts), len(parts))
        else:
            group = dist.new_group(list(range(self.world)), backend="nccl")
            model = make_model(self.hparams, WithLoss).to(torch.bfloat16)
            step = loop_step(self.kind, model, DeviceMesh.from_group(group, "cuda"), parts)
        step()
        self.states.others_are_made()
        return step

    def pairs(self) -> StepInterleave:
        block = self.args.block if self.rows * self.length > 2048 else 3 * self.args.block
        fence = partial(dist.barrier, device_ids=[torch.cuda.current_device()])
        return StepInterleave(self.make_loop, block=block, pairs=self.args.pairs, fence=fence)

    def ours(self) -> None:
        pairs = self.pairs()
        size = len(self.parts) // self.batches
        batches = [{"input_ids": torch.cat(self.parts[i : i + size])} for i in range(0, len(self.parts), size)]
        loader = DataLoader(batches * pairs.steps, batch_size=None, pin_memory=True)
        run = trainer(self.world, pairs.steps, "bf16-true", self.strategy(), [self.states, pairs])
        run.accumulate_grad_batches = self.batches
        run.fit(make_model(self.hparams, BenchGPT), loader)
        self.say(f"{pairs.result.report(self.title('ours'), BAR)}")
        peak, formula = self.states.peak / 2**30, self.states.formula / 2**30
        self.say(f"    peak {peak:.2f} GiB with states of {formula:.2f} GiB by the formula, fullest rank")

    def by_lightning(self) -> None:
        pairs = self.pairs()
        batches = [{"input_ids": part} for part in self.parts] * pairs.steps
        sizes = (self.world, 1) if self.kind.startswith("dp") else (1, self.world)
        strategy = ModelParallelStrategy(data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
        run = trainer(self.world, pairs.steps, "bf16-true", strategy, [pairs])
        run.accumulate_grad_batches = len(self.parts)
        module = make_model(self.hparams, ByLightning)
        module.layout = self.kind
        run.fit(module, DataLoader(batches, batch_size=None, pin_memory=True))
        self.say(pairs.result.report(self.title("Lightning's ModelParallelStrategy"), BAR))

    def title(self, who: str) -> str:
        shape = f"{self.args.microbatches} x ({self.rows} x {self.length} tokens)"
        return f"{who} in layout {self.layout} against torch's own tools, {shape}, {self.world} GPUs"

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*LAYOUTS, "dp-zero3-step", "dp-zero3-batches", "pp"]
    parser.add_argument("--layouts", nargs="+", default=["tp", "dp-zero3", "pp"], choices=choices)
    parser.add_argument("--tokens", nargs="+", default=["4x2048"], help="rows x length of a micro-batch")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block", type=int, default=1, help="steps of a block (three times as many for small ones)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, over all GPUs")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--schedule", default="1f1b", help="of layout pp")
    parser.add_argument("--cuda-graphs", action="store_true", help="in layout pp")
    parser.add_argument("--lightning", action="store_true", help="Lightning's ModelParallelStrategy in place of ours")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    bind_to_cores()
    if os.environ["RANK"] == "0":
        what = f"{os.environ['WORLD_SIZE']} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
        print(f"{what}, {datetime.now():%Y-%m-%d}", flush=True)
    for shape in args.tokens:
        for layout in args.layouts:
            comparison = Comparison(layout, shape, args)
            if args.lightning:
                comparison.by_lightning()
            else:
                comparison.ours()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
