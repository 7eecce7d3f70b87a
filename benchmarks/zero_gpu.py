"""Ours through Trainer.fit against bare loops of DDP and FSDP2, same model, same rows, same GPUs, one run.

    torchrun --nproc-per-node 2 benchmarks/zero_gpu.py
        [--tokens 4x2048 1x1024] [--compare 1:ddp 2:fsdp2 3:fsdp2-reshard] [--masters] [--pairs 20]
        [--keep-root] [--prefetch none|forward|both]
    python benchmarks/zero_gpu.py --offload         # see zero_offload.py

A GPT of 32 layers, width 2048, vocabulary 32000 in bf16, AdamW; 8 micro-batches a step, dealt to the GPUs, gradients
accumulated over those of a GPU. First, with a small model, losses of every stage are compared with one process.

Peers: `ddp` reduces with the last micro-batch; `fsdp2` and `fsdp2-reshard` after every one, so that gradients stay
divided as in stages 2 and 3; `fsdp2-last` keeps them whole and reduces with the last; `deepspeed` is its own loop in
the same stage (zero_peer.py; with --masters, since it updates 32 bits always). With --masters both sides update
32-bit parameters (the peers' compute in bf16 by FSDP2's policy; DDP has none and is left out). Beside the ratio: what a
GPU computes with nobody to talk to, and each side's peak memory, states included.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import zero_offload
from benchmarks.gpu_runs import BenchGPT, bind_to_cores, make_model, repeat, trainer
from benchmarks.pairs import Interleave, synchronize
from benchmarks.zero_peer import DeepSpeedPeer
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.measure.storages import count_bytes, tensors_in
from lightning_parallel.strategies import ZeROStrategy

BARS = {"1:ddp": 1.02, "2:fsdp2": 1.0, "3:fsdp2-reshard": 1.0}
Step = Callable[[], None]


class WithLoss(BenchGPT):
    """Its forward is its loss, as wrappers of a bare loop want it."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = GPT.forward(self, tokens)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Peer:
    """A bare loop: its model, its optimizer, and one step over this rank's micro-batches."""

    def __init__(self, kind: str, hparams: dict, parts: list[Tensor], masters: bool) -> None:
        self.kind, self.parts = kind, parts
        self.model = make_model(hparams, WithLoss).to(torch.float32 if masters else torch.bfloat16)
        group = dist.new_group(list(range(dist.get_world_size())), backend="nccl")
        if kind == "ddp":
            device = [torch.cuda.current_device()]
            self.forward = DistributedDataParallel(
                self.model, device, process_group=group, gradient_as_bucket_view=True
            )
        elif kind != "none":
            self._shard(DeviceMesh.from_group(group, "cuda"), masters)
        if kind != "ddp":
            self.forward = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def _shard(self, mesh: DeviceMesh, masters: bool) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if masters else None)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=self.kind == "fsdp2-reshard", mp_policy=policy)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for i, part in enumerate(self.parts):
            last = i + 1 == len(self.parts)
            if self.kind == "fsdp2-last":
                self.model.set_requires_gradient_sync(last)
            waits = self.kind == "ddp" and not last
            with self.forward.no_sync() if waits else nullcontext():
                (self.forward(part) / len(self.parts)).backward()
        self.optimizer.step()


class StepInterleave(Interleave):
    """Counts steps of the optimizer, of which several batches make one."""

    seen = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step != self.seen:
            self.seen = trainer.global_step
            super().on_train_batch_end(trainer, pl_module, *args)


def held(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of parameters, gradients and optimizer states of one side."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = tensors_in([[*o.state, *o.state.values()] for o in optimizers])
    return count_bytes([*parameters, *gradients, *states], "cuda", set())


class Peak(Callback):
    """Peak memory of our last step, bytes; what the peer holds meanwhile is not counted."""

    nbytes = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == trainer.max_steps - 1 and not self.nbytes:
            synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.nbytes = held(pl_module, trainer.optimizers) - torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == trainer.max_steps:
            self.nbytes += torch.cuda.max_memory_allocated()


def peak_of(peer: Peer | DeepSpeedPeer) -> int:
    """Peak memory of one of the peer's steps, bytes."""
    peer.step()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - held(peer.model, [peer.optimizer])
    peer.step()
    synchronize()
    return torch.cuda.max_memory_allocated() - others


def milliseconds(step: Step) -> float:
    step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def compare(pair: str, rows: int, length: int, args: argparse.Namespace) -> None:
    stage, kind = int(pair.partition(":")[0]), pair.partition(":")[2]
    rank, world = dist_rank(), int(os.environ["WORLD_SIZE"])
    hparams = {
        "vocabulary": args.vocabulary, "context": length, "width": args.width, "num_blocks": args.layers,
        "num_heads": args.width // 128, "tie_embeddings": False, "explicit_mask": False,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, args.vocabulary, (rows * args.microbatches, length), generator=generator)
    mine = list(tokens.chunk(args.microbatches))[rank::world]
    parts = [part.cuda() for part in mine]
    peak, peer_peak, compute = Peak(), 0, 0.0

    def make_peer(module: LightningModule) -> Step:
        nonlocal peer_peak, compute
        alone = Peer("none", hparams, parts, masters=False)
        compute = milliseconds(alone.step)
        del alone
        torch.cuda.empty_cache()
        peer: Peer | DeepSpeedPeer = (
            DeepSpeedPeer(lambda: make_model(hparams, WithLoss), stage, parts)
            if kind == "deepspeed"
            else Peer(kind, hparams, parts, args.masters)
        )
        peer_peak = peak_of(peer)
        return peer.step

    block = max(1, args.block if rows * length > 2048 else 3 * args.block)
    fence = lambda: dist.barrier(device_ids=[torch.cuda.current_device()])  # noqa: E731
    pairs = StepInterleave(make_peer, block=block, pairs=args.pairs, fence=fence)
    batches = [{"input_ids": part} for part in mine] * pairs.steps
    loader = torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=True)
    strategy = ZeROStrategy(
        stage=stage, master_weights=args.masters, bucket_mb=args.bucket_mb, keep_root=args.keep_root,
        prefetch=args.prefetch,
    )  # fmt: skip
    fit = trainer(world, pairs.steps, "bf16-true", strategy, [peak, pairs, told := Told(peak)])
    fit.accumulate_grad_batches = len(mine)
    told.peer = lambda: peer_peak
    fit.fit(make_model(hparams, BenchGPT), loader)
    if rank == 0:
        name = f"stage {stage} against {kind}, {args.microbatches} x ({rows} x {length} tokens) on {world} GPUs"
        print(pairs.result.report(name, BARS.get(pair, 1.0)))
        print(
            f"    computing alone {compute:.1f} ms; peak with states, fullest rank: ours {told.peaks[0] / 2**30:.2f}"
            f" GiB, peer {told.peaks[1] / 2**30:.2f} GiB",
            flush=True,
        )
    torch.cuda.empty_cache()


class Told(Callback):
    """The larger peak of all ranks, ours and the peer's."""

    peer: Callable[[], int]

    def __init__(self, peak: Peak) -> None:
        self.peak, self.peaks = peak, [0.0, 0.0]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        both = torch.tensor([float(self.peak.nbytes), float(self.peer())])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        self.peaks = both.tolist()


def dist_rank() -> int:
    return int(os.environ["RANK"])


class Losses(Callback):
    """The mean over ranks of each step's loss."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: dict, *args: object) -> None:
        self.seen.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone())))


def check_parity(world: int) -> None:
    """A small fp32 model: four losses of every stage beside those of one process on all rows."""
    hparams = {"vocabulary": 64, "context": 32, "width": 256, "num_blocks": 4, "num_heads": 2}
    tokens = torch.randint(0, 64, (4 * world, 32), generator=torch.Generator().manual_seed(1))
    model, plain = make_model(hparams), []
    optimizer = model.configure_optimizers()
    for _ in range(4):
        optimizer.zero_grad()
        loss = model._loss({"input_ids": tokens.cuda()})
        loss.backward()
        optimizer.step()
        plain.append(float(loss))
    for stage, engine in ((1, None), (2, None), (2, "fsdp2"), (3, None)):
        ours = Losses()
        strategy = ZeROStrategy(stage=stage, engine=engine, bucket_mb=1.0)
        batches = repeat({"input_ids": tokens[dist_rank() :: world]}, 4)
        trainer(world, 4, "32", strategy, [ours]).fit(make_model(hparams), batches)
        difference = max(abs(a - b) for a, b in zip(ours.seen, plain, strict=True))
        if dist_rank() == 0:
            print(f"stage {stage} {engine or ''}: largest difference of four losses {difference:.2e}", flush=True)
        assert difference < 1e-4, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", default=["4x2048", "1x1024"], help="rows x length of a micro-batch")
    parser.add_argument("--compare", nargs="+", default=list(BARS), metavar="STAGE:PEER")
    parser.add_argument("--masters", action="store_true", help="update 32-bit parameters on both sides")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block", type=int, default=2, help="steps of a block (three times as many for small ones)")
    parser.add_argument("--bucket-mb", type=float, default=128.0)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, over all GPUs")
    parser.add_argument("--keep-root", action="store_true", help="stage 3: see ZeROStrategy")
    parser.add_argument("--prefetch", default="forward", choices=["none", "forward", "both"], help="see ZeROStrategy")
    parser.add_argument("--offload", action="store_true", help="states 1.5 times the memory of one GPU")
    zero_offload.add_arguments(parser)
    args = parser.parse_args()
    if args.offload:
        zero_offload.offload(args)
        return
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    world = int(os.environ["WORLD_SIZE"])
    if args.microbatches % world:
        parser.error(f"--microbatches {args.microbatches} cannot be dealt to {world} GPUs evenly")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    bind_to_cores()
    if dist_rank() == 0:
        what = f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
        print(f"{what}, {datetime.now():%Y-%m-%d}, {'32' if args.masters else '16'}-bit parameters", flush=True)
    check_parity(world)
    for shape in args.tokens:
        rows, length = map(int, shape.split("x"))
        for pair in args.compare:
            if not (args.masters and pair.endswith("ddp")):
                compare(pair, rows, length, args)


if __name__ == "__main__":
    main()
