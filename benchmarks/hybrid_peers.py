"""Torch's own tools on the demo's GPT, as torchtitan composes them: what layouts of `hybrid_gpu.py` are compared with.

Tensor parallelism is DTensor's `parallelize_module` with a parallel loss; ZeRO 3 is FSDP2 by block; a pipeline is
torch's 1F1B. And Lightning's ModelParallelStrategy, whose user writes the same calls in `configure_model`.

    torchrun --nproc-per-node 2 benchmarks/hybrid_peers.py

checks that a model cut by DTensor has the losses of the whole one, on GPUs or a CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu_runs import BenchGPT
from lightning_parallel.demo.gpt import GPT, Block

Step = Callable[[], None]


class HeadsOfRank(Block):
    """The demo's block with a rank's heads: [B, T, C] to [B, T, C]; q, k and v of a head lie side by side."""

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv, size = self.qkv(x), x.shape[-1] // self.num_heads
        batch, length, features = qkv.shape
        q, k, v = qkv.view(batch, length, features // (3 * size), 3, size).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, features // 3))


class WithLoss(BenchGPT):
    """Its forward is its loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = GPT.forward(self, tokens)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def side_by_side(model: GPT) -> None:
    """Have every block compute with heads that lie side by side."""
    for block in model.blocks:
        block.__class__ = HeadsOfRank


def cut(model: GPT, mesh: DeviceMesh) -> None:
    """Megatron's plan by DTensor, in place."""
    side_by_side(model)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": head})
    for block in model.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in ("qkv", "up")}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """FSDP2 by block, parameters freed after the forward."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


LAYOUTS: dict[str, tuple[Callable[[GPT, DeviceMesh], None], Callable[[], AbstractContextManager[Any]]]] = {
    "tp": (cut, loss_parallel),
    "dp-zero3": (shard, nullcontext),
}


def unmixed(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters as groups of an optimizer, of which one kernel takes DTensors or none."""
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    return [{"params": ps} for ps in (cut, [p for p in model.parameters() if not isinstance(p, DTensor)]) if ps]


def loop_step(layout: str, model: GPT, mesh: DeviceMesh, parts: list[Tensor]) -> Step:
    """All micro-batches and one step of AdamW in a bare loop; the model is cut in place."""
    apply, context = LAYOUTS[layout]
    apply(model, mesh)
    optimizer = torch.optim.AdamW(unmixed(model), lr=1e-4, fused=parts[0].is_cuda)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with context():
            for part in parts:
                (model(part) / len(parts)).backward()
        optimizer.step()

    return step


class ByLightning(WithLoss):
    """The same under Lightning's ModelParallelStrategy."""

    layout = "tp"

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        axis = "tensor_parallel" if self.layout == "tp" else "data_parallel"
        LAYOUTS[self.layout][0](self, self.device_mesh[axis])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with LAYOUTS[self.layout][1]():
            return self(batch["input_ids"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(unmixed(self), lr=1e-4, fused=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with LAYOUTS[self.layout][1]():
            loss.backward(*args, **kwargs)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    tokens, losses = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1)).to(device), {}
    for name in ("whole", "tp"):
        torch.manual_seed(0)
        model = WithLoss(64, 32, 64, 2, 4, tie_embeddings=False, explicit_mask=False).to(device)
        side_by_side(model)
        if name == "tp":
            cut(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(3):
            optimizer.zero_grad()
            with loss_parallel() if name == "tp" else nullcontext():
                loss = model(tokens)
                loss.backward()
            optimizer.step()
            losses[name].append(float(loss))
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if dist.get_rank() == 0:
        print(f"by DTensor: largest difference of three losses {difference:.2e} ({losses['tp']})")
    assert difference < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
