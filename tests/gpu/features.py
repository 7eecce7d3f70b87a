"""What is tried on GPUs: strategies and options, each trained for three steps on a small model.

    TEST_GPUS=1 torchrun --nproc-per-node N -m tests.gpu.features RESULTS [NAME ...]

appends one line of JSON a feature to RESULTS: what rank 0 saw, or the error that ended it. `test_features.py` starts it
and compares; without names it runs all that fit N GPUs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_parallel.callbacks import MemoryMonitor
from lightning_parallel.checkpoint.sharded import consolidate
from lightning_parallel.demo.gpt import GPT
from lightning_parallel.strategies import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)

STEPS = 3
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Small(GPT):
    """With an example, a metric and plain SGD, which shows a wrong scale as it is."""

    def __init__(self, width: int = 256) -> None:
        super().__init__(vocabulary=64, context=32, width=width, num_blocks=8, num_heads=2, tie_embeddings=True)
        self.example_input_array = torch.zeros(2, 32, dtype=torch.int64)
        self.mean = MeanMetric()

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", self.mean(loss.detach()), on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Twice(Small):
    """Calls its model twice a step, on the rows and on the rows backwards."""

    def _loss(self, batch: dict) -> Tensor:
        forth, back = super()._loss(batch), super()._loss({"input_ids": batch["input_ids"].flip(1)})
        return (forth + back) / 2


class WithAdam(Small):
    """With an optimizer that has states, for ZeRO and checkpoints."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Perceptron(LightningModule):
    """Small enough for servers; Adam, which they know."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["input_ids"][:, 0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Feature:
    """A strategy's arguments, and what is trained with it.

    Args:
        options: of the strategy.
        gpus: how many it needs, 0 for any number.
        at_least: how many it needs at least.
        module: what is trained.
        strategy: its class.
        trainer: arguments of the Trainer: precision, accumulation, clipping.
        resume: "" or where a fourth step goes on from a checkpoint of the first three: "cuda" or "cpu".
        package: what has to be installed for it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 0
    at_least: int = 1
    module: type[LightningModule] = Small
    strategy: type[Strategy] = PipelineStrategy
    trainer: Mapping[str, Any] = field(default_factory=dict)
    resume: str = ""
    package: str = ""

    def left_out(self, gpus: int) -> str:
        """Why it cannot run on so many GPUs; "" if it can."""
        if self.gpus not in (0, gpus):
            return f"needs {self.gpus} GPUs, not {gpus}"
        if gpus < self.at_least:
            return f"needs {self.at_least} GPUs or more, not {gpus}"
        return ""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return STEPS + bool(self.resume)

    @property
    def batches(self) -> int:
        """Batches of the whole run, each with a loss."""
        return self.steps * self.trainer.get("accumulate_grad_batches", 1)


def pipeline(schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    return {"schedule": schedule, "num_microbatches": 4, **options}


def of_pipelines() -> dict[str, Feature]:
    """The pipeline's schedules and options."""
    plain = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v", "v_min", "v_half", "dualpipe_v", "auto")
    both_ways = {"chimera": {}, "chimera:doubling=true": {"num_microbatches": 8}, "dualpipe": {}, "gems": {}}
    graphs = ("1f1b", "interleaved_1f1b", "zb_v", "v_min")
    options = {
        "recompute by block": {"recompute": "block"},
        "recompute by stage": {"recompute": "stage"},
        "skip connections": {"skip_connections": True},
        "dynamic shapes": {"dynamic_shapes": True},
        "partition by time": {"partition": "time"},
    }
    copies = {"data_parallel_size": 2}
    return {
        **{f"pipeline {name}": Feature(pipeline(name)) for name in plain},
        **{f"pipeline {name}": Feature(pipeline(name, **more), at_least=2) for name, more in both_ways.items()},
        **{f"pipeline {name}, CUDA graphs": Feature(pipeline(name, cuda_graphs=True)) for name in graphs},
        "pipeline dualpipe, CUDA graphs": Feature(pipeline("dualpipe", cuda_graphs=True), at_least=2),
        **{f"pipeline, {name}": Feature(pipeline(**more)) for name, more in options.items()},
        "pipeline, two copies": Feature(pipeline(**copies), 2),
        "pipeline, two copies, CUDA graphs": Feature(pipeline(**copies, cuda_graphs=True), 2),
        "pipeline, two copies of two stages, ZB-V, CUDA graphs": Feature(
            pipeline("zb_v", **copies, cuda_graphs=True), 4
        ),
        **{
            f"pipeline {name}, called twice{', CUDA graphs' * graphs}": Feature(
                pipeline(name, cuda_graphs=graphs), module=Twice
            )
            for name, graphs in (("1f1b", False), ("1f1b", True), ("zb_v", False))
        },
        "pipeline chimera, called twice": Feature(pipeline("chimera"), module=Twice, at_least=2),
        "pipeline, accumulation and clipping": Feature(
            pipeline(), trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        ),
        **{
            f"pipeline, {precision}": Feature(pipeline(), trainer={"precision": precision})
            for precision in ("16-mixed", "bf16-mixed", "bf16-true")
        },
    }


def of_zero() -> dict[str, Feature]:
    """ZeRO's stages and engines, offload and precisions."""
    engines = [(1, "native", ""), (2, "native", ""), (2, "fsdp2", ""), (3, "fsdp2", "")]
    engines += [(stage, "deepspeed", "deepspeed") for stage in (1, 2, 3)]
    of = {"module": WithAdam, "strategy": ZeROStrategy}
    return {
        **{
            f"ZeRO {stage}, {engine}": Feature({"stage": stage, "engine": engine}, package=package, **of)
            for stage, engine, package in engines
        },
        **{
            f"ZeRO {stage}, bf16-mixed": Feature({"stage": stage}, trainer={"precision": "bf16-mixed"}, **of)
            for stage in (1, 2, 3)
        },
        "ZeRO 2, offload": Feature({"stage": 2, "offload": True}, **of),
        "ZeRO 2, accumulation and clipping": Feature(
            {"stage": 2}, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, **of
        ),
    }


def mesh(
    data: int, pipeline: int, tensor: int, zero: int = 0, schedule: str = "1f1b", **options: Any
) -> dict[str, Any]:
    sizes = {"data_parallel_size": data, "pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}
    return {**sizes, "zero_stage": zero, "schedule": schedule, "num_microbatches": 4, **options}


def of_meshes() -> dict[str, Feature]:
    """Axes together."""
    layouts: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
        *(((1, 1, 1, zero), {}) for zero in range(4)),
        *(((2, 1, 1, zero), {}) for zero in (1, 2, 3)),
        ((1, 1, 2, 0), {}),
        ((1, 1, 2, 0), {"sequence_parallel": True}),
        ((1, 2, 1, 0), {"schedule": "zb_v"}),
        *(((2, 2, 1, zero), {"schedule": "zb_v"}) for zero in (1, 2, 3)),
        ((1, 2, 2, 0), {"schedule": "zb_v"}),
        ((2, 1, 2, 3), {}),
        ((1, 1, 1, 3), {"gather": "microbatch"}),
        ((2, 1, 1, 3), {"gather": "microbatch"}),
    ]
    return {
        f"mesh {data} x {pipeline} x {tensor}, ZeRO {zero}"
        + "".join(f", {name}={value}" for name, value in options.items()): Feature(
            mesh(data, pipeline, tensor, zero, **options), data * pipeline * tensor, strategy=HybridStrategy
        )
        for (data, pipeline, tensor, zero), options in layouts
    } | {"tensor axis": Feature(strategy=TensorParallelStrategy)}


def of_checkpoints() -> dict[str, Feature]:
    """A fourth step from a checkpoint, on the same GPUs or on a CPU."""
    kinds: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
        "pipeline, full": (PipelineStrategy, pipeline()),
        "pipeline, sharded": (PipelineStrategy, pipeline(state_dict_type="sharded")),
        **{f"ZeRO {stage}": (ZeROStrategy, {"stage": stage}) for stage in (1, 2, 3)},
        "mesh, ZeRO 3": (HybridStrategy, {"zero_stage": 3, "num_microbatches": 4}),
    }
    return {
        f"checkpoint of {name}, resumed on {device.upper()}": Feature(
            options, strategy=strategy, module=WithAdam, resume=device
        )
        for name, (strategy, options) in kinds.items()
        for device in ("cuda", "cpu")
    }


def of_servers() -> dict[str, Feature]:
    """Workers on GPUs, servers on the host."""
    return {
        f"parameter server, {consistency}, update by the {update}": Feature(
            {"consistency": consistency, "update": update},
            gpus=1 if consistency == "async" else 0,
            module=Perceptron, strategy=ParameterServerStrategy, package="zmq",
        )
        for consistency, update in (("bsp", "server"), ("bsp", "worker"), ("async", "server"))
    }  # fmt: skip


FEATURES: dict[str, Feature] = {**of_pipelines(), **of_zero(), **of_meshes(), **of_checkpoints(), **of_servers()}


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *args: object) -> None:
        self.seen.append(float(outputs["loss"]))


def loader() -> DataLoader:
    """A batch of eight rows of 32 tokens, again and again: a run that is resumed begins its loader anew.

    Every rank has all rows.
    """
    tokens = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": tokens}] * 8, None)


def run(
    feature: Feature, strategy: Strategy | str, devices: int, steps: int, accelerator: str, checkpoint: str | None
) -> tuple[Trainer, list[float]]:
    """Train until so many steps are done; the losses of this run."""
    seed_everything(0, verbose=False)
    losses = Losses()
    monitors = [MemoryMonitor(every_n_steps=2)] if isinstance(strategy, Strategy) else []
    trainer = Trainer(
        accelerator=accelerator, devices=devices, max_steps=steps, max_epochs=-1, strategy=strategy,
        callbacks=[losses, *monitors], use_distributed_sampler=False, **QUIET, **feature.trainer,
    )  # fmt: skip
    trainer.fit(feature.module(), loader(), ckpt_path=checkpoint)
    return trainer, losses.seen


def losses_of(feature: Feature, devices: int, folder: Path) -> list[float]:
    """What rank 0 saw, with the step from a checkpoint behind the others."""
    trainer, losses = run(feature, feature.strategy(**feature.options), devices, STEPS, "cuda", None)
    if feature.resume:
        path = str(folder / f"{uuid.uuid5(uuid.NAMESPACE_OID, repr(feature))}.ckpt")  # the same on all ranks
        trainer.save_checkpoint(path)
        if feature.resume == "cuda" or os.environ.get("RANK", "0") == "0":
            losses += resumed(feature, devices, path)
    return losses


def resumed(feature: Feature, devices: int, path: str) -> list[float]:
    """The fourth step: under the same strategy on GPUs, or in one process on a CPU."""
    if feature.resume == "cuda":
        return run(feature, feature.strategy(**feature.options), devices, STEPS + 1, "cuda", path)[1]
    if os.path.isdir(path):  # of a part a rank: a plain Trainer reads one file
        consolidate(Path(path), Path(path + ".one"))
        path += ".one"
    with _alone():
        return run(feature, "auto", 1, STEPS + 1, "cpu", path)[1]


@contextlib.contextmanager
def _alone() -> Any:
    """Without torchrun's variables, so that a plain Trainer is one process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def main() -> None:
    results, *names = sys.argv[1:]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    folder = Path(tempfile.gettempdir()) / f"gpu_features_{os.getppid()}"  # all ranks of this launch have it
    folder.mkdir(exist_ok=True)
    try:
        for name in names or [name for name, feature in FEATURES.items() if not feature.left_out(world)]:
            report = _report(FEATURES[name], world, folder)
            if rank == 0:
                with open(results, "a") as file:
                    file.write(json.dumps({"name": name, **report}) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(feature: Feature, world: int, folder: Path) -> dict[str, Any]:
    try:
        return {"losses": losses_of(feature, world, folder)}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
