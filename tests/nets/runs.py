"""Runs of the layouts: three steps on forked ranks, recorded, and the same in one process."""

from __future__ import annotations

import hashlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

from tests.harness import free_port, run_ranks
from tests.nets.calls import Calls, recorded
from tests.nets.layouts import LAYOUTS, Layout
from tests.nets.models import batches
from tests.trainer.pipelines import join_as_torchrun, make_trainer

STEPS = 3


@dataclass
class Run:
    """What became of a run on one rank; of a layout's weights and states of the optimizer (digests) rank 0 has all."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)


class Noted(Callback):
    """Fills a `Run`, and says in which part of the run calls are made."""

    def __init__(self, calls: Calls | None = None) -> None:
        self.run, self.calls = Run(), calls or Calls()
        self.calls.enter("before the first batch")

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self.calls.enter(f"batch {index}")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.run.losses.append(float(outputs["loss"].detach()))

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.calls.enter("validation")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.calls.enter("states")
        state = trainer.strategy.lightning_module_state_dict()
        states = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        self.calls.enter("after that")
        self.run.weights = {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}
        for number, of in enumerate(states):
            for index, fields in of.get("state", {}).items():
                values = (torch.as_tensor(fields[name]) for name in sorted(fields))
                self.run.optimizer[f"{number}.{index}"] = " ".join([digest(*values), *sorted(fields)])


def fit(layout: Layout, strategy: Any, devices: int, loader: Any, calls: Calls | None = None, **trainer: Any) -> Run:
    """Three steps in this process."""
    torch.manual_seed(1)
    module, noted = layout.model(), Noted(calls)
    options = {
        "max_steps": STEPS, "limit_val_batches": 0, "use_distributed_sampler": False, **layout.trainer, **trainer
    }  # fmt: skip
    make_trainer(strategy, devices, [noted], **options).fit(module, loader, loader)
    noted.run.calls = {part: lines for part, lines in noted.calls.parts.items() if lines}
    return noted.run


def on_rank(layout: Layout, rank: int, port: int) -> Run:
    """This rank's part of a run."""
    join_as_torchrun(rank, layout.ranks, port)
    loader = batches(STEPS * layout.batches_per_step, layout.copies, layout.place(rank))
    with recorded() as calls:
        return fit(layout, layout.make(), layout.ranks, loader, calls)


def launched(names: Sequence[str], timeout: float = 100.0) -> dict[str, list[Run]]:
    """Runs of layouts of equally many ranks, one after the other in one launch; for each one run a rank."""
    [ranks] = {LAYOUTS[name].ranks for name in names}

    def run(rank: int, ports: Sequence[int]) -> list[Run]:
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
        return [_named(name, rank, port) for name, port in zip(names, ports, strict=True)]

    found = run_ranks(run, ranks, [free_port() for _ in names], group=False, timeout=timeout)
    return {name: [of_rank[number] for of_rank in found] for number, name in enumerate(names)}


def _named(name: str, rank: int, port: int) -> Run:
    try:
        return on_rank(LAYOUTS[name], rank, port)
    except BaseException as error:
        error.__notes__ = [*getattr(error, "__notes__", []), f"in layout {name!r}"]  # type: ignore[attr-defined]
        raise


@cache
def one_process(name: str, parts: int = 1) -> Run:
    """The run under a plain Trainer with all rows, each batch cut into so many that are accumulated."""
    layout = LAYOUTS[name]
    loader = batches(STEPS * layout.batches_per_step, parts=parts)
    accumulated = {"accumulate_grad_batches": layout.batches_per_step * parts}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of training batches")
        return fit(layout, "auto", 1, loader, **accumulated)


# -- bits --------------------------------------------------------------------------------------------------------------


def digest(*tensors: Tensor) -> str:
    """A few letters that tell these bits from others."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


def fingerprint(name: str) -> dict[str, str]:
    """Bits that this machine makes of the same module without any strategy: in one process, whole rows and parts of
    them, and what its kernels make of matrices of the sizes into which layers are cut."""
    runs = [one_process(name, parts) for parts in (1, 4)]
    return {"one process": digest(*(value for run in runs for value in run.weights.values())), "kernels": kernels()}


@cache
def kernels() -> str:
    """A digest of products, norms, attention and what backwards make of them, in 32 and 16 bits."""
    g = torch.Generator().manual_seed(0)
    found = []
    for count, width, out in ((1, 6, 6), (2, 8, 24), (4, 8, 4), (8, 4, 8), (12, 16, 8), (48, 8, 32), (6, 32, 8)):
        for dtype in (torch.float32, torch.bfloat16):
            x, w, b = (torch.randn(shape, generator=g) for shape in ((count, width), (out, width), (out,)))
            x, w, b = (value.to(dtype).requires_grad_() for value in (x, w, b))
            y = F.layer_norm(F.gelu(F.linear(x, w, b), approximate="tanh"), (out,))
            q = y.view(1, 1, count, out)
            z = F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean() + torch.tanh(y).sum()
            F.cross_entropy(y.float(), torch.arange(count) % out).add(z.float()).backward()
            found += [y, z, x.grad, w.grad, b.grad]
    return digest(*found)


def versions() -> dict[str, str]:
    """Of the packages that have a say in what is recorded."""
    names = ("torch", "lightning", "deepspeed")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
