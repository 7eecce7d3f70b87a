"""A tensor axis of two CPU processes: plain tensors beside torch's `parallelize_module` on DTensors.

    python benchmarks/tensor_cpu.py --layers 8 --width 64 --rows 4

Perceptrons (a norm, a widening and a narrowing product, a residual sum), forward, backward and AdamW, in interleaved
rounds; prints the medians and the median of the rounds' ratios. Small layers show what the host pays for an operator.
`--overlap` puts ours with the overlap of sums and weight gradients in DTensor's place.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.tensor_parallel import TensorParallel


class Layer(nn.Module):
    """[rows, positions, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """One training step; returns the loss."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ours, theirs = (build(options.layers, options.width) for _ in range(2))
    TensorParallel(ours, TensorAxis(rank, 2), torch.device("cpu")).cut()
    plan = {
        f"{n}.{name}": style()
        for n in range(options.layers)
        for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    if options.overlap:
        TensorParallel(theirs, TensorAxis(rank, 2), torch.device("cpu"), overlap=True).cut()
    else:
        parallelize_module(theirs, init_device_mesh("cpu", (2,)), plan)
    sides = [(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)) for model in (ours, theirs)]
    x = torch.randn(options.rows, options.positions, options.width)
    seconds: list[list[float]] = [[], []]
    for number in range(options.steps + 5):
        losses = []
        for side, (model, optimizer) in enumerate(sides):
            start = time.perf_counter()
            losses.append(step(model, optimizer, x))
            if number >= 5:
                seconds[side].append(1e3 * (time.perf_counter() - start))
        if number < 5:  # later AdamW has made steps of their rounding
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)
    if rank == 0:
        ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
        ours_ms, theirs_ms = map(statistics.median, seconds)
        other = "with overlap" if options.overlap else "DTensor"
        print(f"ours {ours_ms:.2f} ms, {other} {theirs_ms:.2f} ms, ratio {ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 8, "width": 64, "rows": 4, "positions": 32, "steps": 40, "port": 29611}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--overlap", action="store_true")
    mp.spawn(main, (parser.parse_args(),), nprocs=2)
