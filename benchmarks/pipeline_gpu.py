"""Ours through Trainer.fit against torch.distributed.pipelining and DeepSpeed in bare loops, same GPUs, one run.

    torchrun --nproc-per-node 2 benchmarks/pipeline_gpu.py
        [--tokens 1x1024 4x2048] [--schedules gpipe 1f1b] [--peers 1f1b zb_v deepspeed] [--pairs 20] [--trace FOLDER]

A GPT of 32 layers, width 2048, vocabulary 32000 in bf16, AdamW, 8 micro-batches; one stage a GPU. First, with a small
model, losses are compared with one process. Each of our schedules takes turns with every peer, a row a peer: torch's
schedules by their names, ``deepspeed`` for its PipelineModule (benchmarks/deepspeed_peer.py says how it gets there).
Beside the ratios: what one stage computes with nobody to wait for, times (D-1+M)/M with the optimizer's step, our step
over what the simulator gives for its action times, and each side's peak memory above what it held when its block of
steps began.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu_runs import BenchGPT, bind_to_cores, hparams_of, make_model, repeat, trainer
from benchmarks.pairs import Rounds, synchronize
from benchmarks.peers import NAMES, label, make_peer, peer_of
from benchmarks.torch_peer import limit_ms
from lightning_parallel.callbacks import BubbleMonitor, TimelineExporter
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import PipelineStrategy

BAR = 1.02
STEP_BAR = 1.05  # our step over the simulated one


class Peak(Callback):
    """Peak memory of our last step above what was allocated when it began, bytes."""

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == trainer.max_steps - 1:
            synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == trainer.max_steps:
            self.bytes = torch.cuda.max_memory_allocated() - self._base


class Comparison:
    """One of our schedules against the peers, at one size of micro-batch."""

    def __init__(self, schedule: str, rows: int, length: int, args: argparse.Namespace) -> None:
        self.schedule, self.rows, self.length, self.args = schedule, rows, length, args
        self.others: list[str] = args.peers or [peer_of(schedule)]
        self.hparams = hparams_of(length, args)
        generator = torch.Generator().manual_seed(0)
        shape = (rows * args.microbatches, length)
        self.tokens = torch.randint(0, args.vocabulary, shape, generator=generator)
        self.batch = self.tokens.cuda()
        self.peak = Peak()
        self.peer_peaks: dict[str, int] = {}

    def model(self) -> GPT:
        return make_model(self.hparams)

    def make_peers(self, module: LightningModule) -> dict[str, Callable[[], object]]:
        """The peers' steps, once the peak memory of each was measured."""
        return {other: self.make_peer(other) for other in self.others}

    def make_peer(self, other: str) -> Callable[[], object]:
        step = make_peer(other, self.model, self.batch, self.args.microbatches)
        step()
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step()
        synchronize()
        self.peer_peaks[other] = torch.cuda.max_memory_allocated() - base
        return step

    def strategy(self) -> PipelineStrategy:
        partition = self.args.partition
        return PipelineStrategy(
            schedule=self.schedule,
            num_microbatches=self.args.microbatches,
            partition=[int(n) for n in partition.split(",")] if "," in partition else partition,
            check_loss=False,
            receive_ahead=self.args.receive_ahead,
            cuda_graphs=self.args.cuda_graphs,
        )

    def run(self, world: int) -> None:
        """Measure, and print a line a peer and one of ours."""
        block = max(1, self.args.block if self.rows * self.length > 2048 else 3 * self.args.block)
        fence = partial(dist.barrier, device_ids=[torch.cuda.current_device()])
        pairs = Rounds(self.make_peers, block=block, pairs=self.args.pairs, fence=fence)
        limit, monitor = Limit(self), BubbleMonitor(every_n_steps=5 * block)
        callbacks: list[Callback] = [self.peak, pairs, limit, monitor]
        if self.args.trace:
            folder = Path(self.args.trace) / f"{self.schedule}_{self.rows}x{self.length}"
            callbacks.append(TimelineExporter(folder, every_n_steps=pairs.steps - 2))
        loader = repeat({"input_ids": self.tokens}, pairs.steps)
        run = trainer(world, pairs.steps, "bf16-true", self.strategy(), callbacks)
        run.fit(make_model(self.hparams, BenchGPT), loader)
        if int(os.environ["RANK"]) == 0:
            for other, result in pairs.results.items():
                peak = f"peak of the peer above start {limit.peers[other] / 2**30:.2f} GiB"
                print(f"{result.report(self.title(other, world), self.args.bar)}; {peak}")
            print(f"    {limit.report(pairs, world)}; {_simulated(monitor)}; {monitor.summary()}", flush=True)

    def title(self, other: str, world: int) -> str:
        ours = f"{self.schedule}{' with CUDA graphs' if self.args.cuda_graphs else ''}"
        shape = f"{self.args.microbatches} x ({self.rows} x {self.length} tokens)"
        return f"{ours} against {label(other)}, {shape}, {world} GPUs"


def _simulated(monitor: BubbleMonitor) -> str:
    """Our step, from its first action to its last, over the simulated one."""
    ratio = monitor.step_ratio()
    if ratio is None:
        return "no step was measured"
    met = "met" if 1 / STEP_BAR <= ratio <= STEP_BAR else "MISSED"
    return f"step : simulated {ratio:.4f}, bar {STEP_BAR} {met}"


class Limit(Callback):
    """What computing costs with nobody to wait for, and both sides' peak memory, measured when the training ends."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        of, graphs = self.comparison, trainer.strategy.pipeline.cut.graphs
        self.compute, self.optimizer = limit_ms(of.model, of.batch, of.args.microbatches)
        ours = of.peak.bytes + (graphs.bytes if graphs else 0)
        peaks = torch.tensor([ours, *of.peer_peaks.values()], dtype=torch.float64)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        self.ours, *peers = peaks.tolist()
        self.peers = dict(zip(of.peer_peaks, peers, strict=True))

    def report(self, pairs: Rounds, world: int) -> str:
        m, limit = self.comparison.args.microbatches, self.compute + self.optimizer
        bound = self.compute * (world - 1 + m) / m + self.optimizer
        ours = statistics.median(next(iter(pairs.results.values())).ours)
        return (
            f"limit: compute {self.compute:.1f} + optimizer {self.optimizer:.1f} ms, ours : limit"
            f" {1e3 * ours / limit:.3f}; 1F1B's bound {bound:.1f} ms; our peak above start, dearest rank:"
            f" {self.ours / 2**30:.2f} GiB"
        )


def check_parity(world: int) -> None:
    """A small fp32 model: three losses of the pipeline beside those of one process."""
    hparams = {"vocabulary": 64, "context": 32, "width": 256, "num_blocks": 2 * world, "num_heads": 2}
    tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(1))

    class Losses(Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: dict, *args: object
        ) -> None:
            self.seen.append(outputs["loss"])

    ours, plain = Losses(), Losses()
    trainer(world, 3, "32", PipelineStrategy(num_microbatches=4), [ours]).fit(
        make_model(hparams), repeat({"input_ids": tokens}, 3)
    )
    model = make_model(hparams)
    optimizer = model.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model._loss({"input_ids": tokens.cuda()})
        loss.backward()
        optimizer.step()
        plain.seen.append(loss.detach())
    difference = max(abs(float(a) - float(b)) for a, b in zip(ours.seen, plain.seen, strict=True))
    if int(os.environ["RANK"]) == 0:
        print(
            f"parity on {world} GPUs: largest difference of three losses from one process {difference:.2e}", flush=True
        )
    assert difference < 1e-4, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", default=["1x1024", "4x2048"], help="rows x length of a micro-batch")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"], help="ours")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=NAMES,
        help="torch's schedules and deepspeed, each beside each of ours; default torch's of that name, or 1f1b",
    )
    parser.add_argument("--partition", default="count", help="ours: a name, or blocks of each stage as 8,9,8,7")
    parser.add_argument("--bar", type=float, default=BAR)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--block", type=int, default=2, help="steps of a block (three times as many for small micro-batches)"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--receive-ahead", type=int, default=None)
    parser.add_argument("--cuda-graphs", action="store_true", help="ours with PipelineStrategy(cuda_graphs=True)")
    parser.add_argument("--trace", help="folder for pictures and Perfetto traces of our steps")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    world = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    bind_to_cores()
    if int(os.environ["RANK"]) == 0:
        print(
            f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.now():%Y-%m-%d}",
            flush=True,
        )
    check_parity(world)
    for shape in args.tokens:
        rows, length = map(int, shape.split("x"))
        for schedule in args.schedules:
            Comparison(schedule, rows, length, args).run(world)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
