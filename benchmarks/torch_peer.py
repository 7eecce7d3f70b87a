"""torch.distributed.pipelining's schedules in a bare loop, on the demo's GPT: what ours are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from benchmarks.torch_stage import TorchStage, token_loss
from lightning_parallel.demo.gpt import GPT

ALONE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOP = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
}
SHAPE_OF_V = {"zb_v": ScheduleZBVZeroBubble, "dualpipe_v": ScheduleDualPipeV}
PEERS = ALONE | LOOP | SHAPE_OF_V


def stages_of(schedule: str, rank: int, world: int) -> list[int]:
    """The stages of a rank, two where the schedule wants several."""
    if schedule in ALONE:
        return [rank]
    return [rank, rank + world] if schedule in LOOP else [rank, 2 * world - 1 - rank]


def torch_peer(make: Callable[[], GPT], schedule: str, batch: Tensor, microbatches: int) -> Callable[[], None]:
    """One step of a torch schedule with its optimizer, on this rank."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    group = dist.new_group(list(range(world)), backend="nccl")
    mine = stages_of(schedule, rank, world)
    last = world * len(mine) - 1
    modules = [TorchStage(make(), stage, last + 1).to(device, torch.bfloat16) for stage in mine]
    stages = [PipelineStage(module, s, last + 1, device, group=group) for s, module in zip(mine, modules, strict=True)]
    runner: Any = PEERS[schedule](stages[0] if schedule in ALONE else stages, microbatches, loss_fn=token_loss)
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        runner.step(*((batch,) if 0 in mine else ()), **({"target": batch} if last in mine else {}))
        optimizer.step()

    return step


def limit_ms(make: Callable[[], GPT], batch: Tensor, microbatches: int) -> tuple[float, float]:
    """What this rank's share takes with nobody to wait for, ms a step: forwards and backwards, and the optimizer."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), batch.device
    stage = TorchStage(make(), rank, world).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4, fused=True)
    parts = batch.chunk(microbatches)
    width = stage.blocks[0].qkv.in_features

    def compute() -> None:
        for part in parts:
            x = part if rank == 0 else torch.randn(*part.shape, width, device=device, dtype=torch.bfloat16)
            y = stage(x if rank == 0 else x.requires_grad_())
            (token_loss(y, part) if rank == world - 1 else y.float().sum()).backward()

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for _ in range(2):
        marks[0].record()
        compute()
        marks[1].record()
        optimizer.step()
        marks[2].record()
    torch.cuda.synchronize()
    times = torch.tensor([marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])])
    dist.all_reduce(times)
    return tuple((times / world).tolist())  # type: ignore[return-value]
