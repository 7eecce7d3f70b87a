"""DeepSpeed's PipelineModule on the demo's GPT, its own 1F1B in a bare loop: what ours is compared with.

    torchrun --nproc-per-node 2 benchmarks/deepspeed_peer.py

By itself it checks that both train alike: three losses of a small fp32 GPT beside those of ours, on GPUs or a CPU (then
``DS_ACCELERATOR=cpu``). ``benchmarks/pipeline_gpu.py --peers deepspeed`` measures it.

States are those of ours: where the model is in bf16, so are gradients and AdamW's moments. DeepSpeed's ``bf16`` setting
would keep all of them in fp32 beside it, so it is left off and the module is given to it in bf16. A machine that
reaches no index gets wheels carried along (6 MB; DeepSpeed's is made from its source, without compiled operators):

    DS_BUILD_OPS=0 pip wheel --no-deps --no-build-isolation --wheel-dir wheels deepspeed==0.19.8
    pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 --platform any \\
        --dest wheels pydantic==2.14.4 pydantic-core==2.50.5 typing-inspection annotated-types hjson py-cpuinfo \\
        msgpack einops ninja psutil tqdm packaging typing-extensions
    pip install --no-index --find-links wheels --no-deps wheels/*.whl
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.torch_stage import token_loss
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import PipelineStrategy


class Piece(nn.Module):
    """Block `index` of a GPT, the first with the embeddings before it, the last with the head behind it.

    Layers of equal number a stage are then blocks of equal number a stage, as ours has them.
    """

    def __init__(self, model: GPT, index: int) -> None:
        super().__init__()
        first, last = index == 0, index == len(model.blocks) - 1
        self.embedding, self.position = (model.embedding, model.position) if first else (None, None)
        self.block = model.blocks[index]
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        x = self.block(x)
        return x if self.head is None else self.head(self.norm(x))


def deepspeed_peer(
    make: Callable[[], GPT],
    batch: Tensor,
    microbatches: int,
    dtype: torch.dtype = torch.bfloat16,
    learning_rate: float = 1e-4,
) -> Callable[[], Tensor]:
    """One step of DeepSpeed's pipeline with its optimizer, on this rank; it returns the mean loss.

    Args:
        make: makes the whole model, alike on every rank.
        batch: tokens int64 [B, T] of a step, on this rank's device.
        microbatches: how many a step has; they divide B.
        dtype: of weights, gradients and optimizer states.
        learning_rate: of AdamW.
    """
    deepspeed = _deepspeed()
    from deepspeed.pipe import LayerSpec, PipelineModule

    model = make()
    specs = [LayerSpec(Piece, model, index) for index in range(len(model.blocks))]
    module = PipelineModule(specs, num_stages=dist.get_world_size(), loss_fn=token_loss, partition_method="uniform")
    for spec in specs:
        spec.module_args = ()  # the whole model is not to be held
    module.to(batch.device, dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, fused=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=_config(batch, microbatches))
    parts = [(part, part) for part in batch.chunk(microbatches)]

    def step() -> Tensor:
        return engine.train_batch(iter(parts))

    return step


def _config(batch: Tensor, microbatches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": len(batch) // microbatches,
        "gradient_accumulation_steps": microbatches,
        "steps_per_print": 1_000_000,
        "gradient_clipping": 0.0,  # by default at 1.0
        "zero_optimization": {"stage": 0},
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }


def _deepspeed() -> Any:
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, and is for inference
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


class Beside(Callback):
    """After each of our steps one of the peer's, and both losses."""

    def __init__(self, make: Callable[[], GPT], batch: Tensor, microbatches: int, learning_rate: float) -> None:
        self.arguments, self.learning_rate = (make, batch, microbatches), learning_rate
        self.losses: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        make, batch, microbatches = self.arguments
        batch = batch.to(pl_module.device)
        self.step = deepspeed_peer(make, batch, microbatches, torch.float32, self.learning_rate)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: object) -> None:
        self.losses.append((float(outputs["loss"]), float(self.step())))


class SameOptimizer(GPT):
    """The demo's GPT with the peer's AdamW."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)


def main() -> None:
    """Three losses of both, side by side."""
    world, microbatches, cuda = int(os.environ["WORLD_SIZE"]), 4, torch.cuda.is_available()
    hparams = {"vocabulary": 64, "context": 32, "width": 64, "num_blocks": 2 * world, "num_heads": 2}
    tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(1))

    def make() -> GPT:
        torch.manual_seed(0)
        return SameOptimizer(**hparams, tie_embeddings=False, explicit_mask=False)

    beside = Beside(make, tokens, microbatches, learning_rate=1e-3)
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=world,
        strategy=PipelineStrategy(schedule="1f1b", num_microbatches=microbatches, partition="count"),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[beside],
        use_distributed_sampler=False,
    )
    trainer.fit(make(), DataLoader([{"input_ids": tokens}] * 3, batch_size=None))
    if trainer.is_global_zero:
        print("losses, ours and DeepSpeed's:", "; ".join(f"{ours:.7f} {peer:.7f}" for ours, peer in beside.losses))
    difference = max(abs(ours - peer) for ours, peer in beside.losses)
    assert difference < 1e-5, difference


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    main()
