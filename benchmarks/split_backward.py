"""What it costs to split a backward into gradients of inputs (I) and of weights (W), beside a whole one (B).

    PYTHONPATH=. python benchmarks/split_backward.py [--pairs 30] [--blocks 8] [--width 2048] [--sizes 1x1024 2x2048]

One GPU (bf16), or a CPU (fp32, one thread, tiny sizes: what is left is the time of this thread alone). A pair is
a forward and a whole backward, the same with our split, and, where it runs, the same with the split of
torch.distributed.pipelining, one after another in changing order, each between two synchronisations. Ratios are medians
over pairs, with their quartiles. "On top" is the same where gradients are there already, as they are for all
micro-batches of a step but the first. "Graphs", on a GPU, is the same again with every block launched as CUDA graphs,
as the engine launches them with ``cuda_graphs=True``. Last: gradients of our split against a whole backward's, norm of
the difference over norm, the largest of all parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.graphs import BlockGraphs, SharedGraphs
from lightning_parallel.pipeline.weight_grad import WeightGradients, backward_inputs, plan

try:  # private in torch, and the peer here
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
except ImportError:
    stage_backward_input = stage_backward_weight = None

HEAD = 128  # features of a head


class Block(nn.Module):
    """A GPT's block without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = (
            t.view(rows, length, -1, min(HEAD, width)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Programs:
    """One micro-batch through the blocks, each way."""

    def __init__(self, model: nn.Sequential, x: Tensor) -> None:
        self.model, self.x, self.gradient = model, x, torch.randn_like(x)
        self.parameters = list(model.parameters())
        self.weights = WeightGradients()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def forward(self) -> tuple[Tensor, Tensor]:
        x = self.x.detach().requires_grad_()
        return x, self.model(x)

    def whole(self) -> None:
        _, y = self.forward()
        torch.autograd.backward([y], [self.gradient])

    def inputs(self) -> None:
        _, y = self.forward()
        edge = torch.autograd.graph.get_gradient_edge(y)
        del y
        self.weights = backward_inputs([edge], [self.gradient])

    def planned(self) -> None:
        _, y = self.forward()
        plan([y])

    def halves(self) -> None:
        self.inputs()
        self.weights.run()

    def fused(self) -> None:
        self.inputs()
        self.weights.run(fused=True)

    def walk(self) -> None:
        x, y = self.forward()
        _, groups = stage_backward_input([y], [self.gradient], [x], iter(self.parameters))
        stage_backward_weight(iter(self.parameters), groups)


class Graphs(Programs):
    """The same with every block launched as CUDA graphs. One micro-batch is under way at a time."""

    def __init__(self, model: nn.Sequential, x: Tensor) -> None:
        super().__init__(model, x)
        self.shared = SharedGraphs(x.device)
        self.blocks = [BlockGraphs(f"block {i}", block, self.shared, False) for i, block in enumerate(model)]
        self.whole()  # libraries choose their kernels
        self.shared.end(training=True)
        self.whole()  # captures

    def forward(self) -> tuple[Tensor, Tensor]:
        x = self.x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block.call(block.module, (y,), {})
        return x, y

    def halves(self) -> None:
        with self.shared.leaving_weights() as left:
            self.inputs()
        for slot in left:
            slot.weights()


def seconds(program: Callable[[], object]) -> float:
    """From one synchronisation to the next; on a CPU what this thread worked, whoever else wants the cores."""
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    synchronize()
    began = clock()
    program()
    synchronize()
    return clock() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(
    programs: dict[str, Callable[[], object]], pairs: int, between: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each program in each round, without three rounds to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(pairs + 3):
        order = list(programs) if turn % 2 else list(programs)[::-1]
        for name in order:
            taken[name].append(seconds(programs[name]))
            between()
    return {name: values[3:] for name, values in taken.items()}


def report(name: str, taken: dict[str, list[float]], base: str, bar: float | None = None) -> str:
    """One line: median ms, ratio to the base with its quartiles, and the bar."""
    ratios = sorted(a / b for a, b in zip(taken[name], taken[base], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    verdict = "" if bar is None else f", bar {bar} {'met' if middle <= bar else 'MISSED'}"
    return (
        f"  {name:24s} {1e3 * statistics.median(taken[name]):9.3f} ms, x {middle:.4f} of {base}"
        f" (quartiles {low:.4f} .. {high:.4f}, {len(ratios)} pairs){verdict}"
    )


def largest_error(programs: Programs) -> float:
    """Of our gradients, relative, over all parameters."""
    kept = []
    for program in (programs.whole, programs.halves):
        programs.clear()
        program()
        kept.append([parameter.grad.float() for parameter in programs.parameters])
    programs.clear()
    return max(((a - b).norm() / a.norm()).item() for a, b in zip(*kept, strict=True))


def measure(programs: Programs, pairs: int, bar: float | None) -> None:
    """Print all of one size."""
    fresh = {
        "F": programs.forward,
        "F+B": programs.whole,
        "F+plan": programs.planned,
        "F+I": programs.inputs,
        "F+I+W ours": programs.halves,
    }
    if stage_backward_input is not None:
        fresh["F+I+W torch's walk"] = programs.walk
    taken = interleaved(fresh, pairs, programs.clear)
    for name in fresh:
        print(report(name, taken, "F+B", bar if name == "F+I+W ours" else None), flush=True)
    programs.whole()
    on_top = {"F+B on top": programs.whole, "F+I+W on top": programs.halves, "F+I+W on top, fused": programs.fused}
    taken = interleaved(on_top, pairs, lambda: None)
    for name in on_top:
        print(report(name, taken, "F+B on top"), flush=True)
    if torch.cuda.is_available():
        graphs = Graphs(programs.model, programs.x)
        launched: dict[str, Callable[[], None]] = {"F+B graphs": graphs.whole, "F+I+W graphs": graphs.halves}
        taken = interleaved({**launched, "F+B on top": programs.whole}, pairs, lambda: None)
        for name in launched:
            print(report(name, taken, "F+B graphs", bar if name == "F+I+W graphs" else None), flush=True)
        print(report("F+I+W graphs", taken, "F+B on top"), flush=True)
        print(f"  with graphs: largest relative error of a gradient {largest_error(graphs):.2e}", flush=True)
    print(f"  largest relative error of a gradient {largest_error(programs):.2e}", flush=True)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048 if cuda else 16)
    parser.add_argument("--sizes", nargs="+", default=["1x1024", "2x2048", "4x2048"] if cuda else ["1x4"])
    options = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    if not cuda:
        torch.set_num_threads(1)
    bars = {("1x1024", 2048): 1.15, ("2x2048", 2048): 1.02} if cuda else {}
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}, {options.blocks} blocks of width {options.width}, {dtype}")
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)]).to(device, dtype)
    for size in options.sizes:
        rows, length = map(int, size.split("x"))
        x = torch.randn(rows, length, options.width, device=device, dtype=dtype)
        print(f"{rows} x {length} tokens:")
        measure(Programs(model, x), options.pairs, bars.get((size, options.width)))


if __name__ == "__main__":
    main()
