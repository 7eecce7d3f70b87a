"""Whole Trainer runs under ZeRO on forked ranks, beside Lightning's DDP on the same ranks with the same rows."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_parallel.strategies import ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import row_dataset
from tests.trainer.pipelines import Recorder, join_as_torchrun, make_trainer

STAGES = (1, 2, 3)
OTHERS = [(2, "fsdp2"), *((stage, "deepspeed") for stage in STAGES)]  # beside each stage's own engine


@dataclass(frozen=True)
class Fit:
    """A run of `Trainer.fit`.

    Args:
        make: builds the module.
        trainer: options of the Trainer.
        loader: builds the training loader.
        after: called with trainer and module on every rank when the run has ended.
        resume: a checkpoint to go on from.
    """

    make: Callable[[], LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[], Any] = lambda: row_dataset(40, 4, shuffle=True)
    after: Callable[[Any, LightningModule], Any] | None = None
    resume: Any = None


@dataclass
class Result:
    """What one rank has after a run; `extra` is what `Fit.after` returned."""

    losses: Tensor
    weights: dict[str, Tensor]
    metrics: dict[str, Tensor]
    optimizers: list[Any]
    extra: Any = None


def fit(run: Fit, strategy: Any, devices: int) -> Result:
    """The run in this process, as one rank."""
    torch.manual_seed(1)
    module, recorder = run.make(), Recorder()
    options = dict(run.trainer)
    callbacks = options.pop("callbacks", list)()
    if "plugins" in options:
        options["plugins"] = [options["plugins"]()]
    trainer = make_trainer(strategy, devices, [recorder, *callbacks], **options)
    validation = row_dataset(24, 4) if is_overridden("validation_step", module) else None
    trainer.fit(module, run.loader(), validation, ckpt_path=run.resume)
    record = recorder.record
    metrics = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    extra = None if run.after is None else run.after(trainer, module)
    if dist.is_initialized():  # which Lightning's strategies leave behind
        dist.destroy_process_group()
    losses = torch.stack(record.losses) if record.losses else torch.zeros(0)
    return Result(losses, record.weights, metrics, record.optimizers, extra)


def on_ranks(jobs: Sequence[tuple[Fit, Callable[[], Any]]], ranks: int, timeout: float = 55.0) -> list[list[Result]]:
    """Several runs one after the other in one launch, each with its strategy; for each one result a rank."""

    def on_rank(rank: int, ports: Sequence[int]) -> list[Result]:
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
        found = []
        for port, (run, make) in zip(ports, jobs, strict=True):
            join_as_torchrun(rank, ranks, port)  # Lightning's strategies need a new port every time
            found.append(fit(run, make(), ranks))
        return found

    results = run_ranks(on_rank, ranks, [free_port() for _ in jobs], group=False, timeout=timeout)
    return [list(of_job) for of_job in zip(*results, strict=True)]


def ddp(**options: Any) -> Callable[[], Any]:
    """Lightning's DDP."""
    return lambda: DDPStrategy(process_group_backend="gloo", **options)


def zero(stage: int, **options: Any) -> Callable[[], Any]:
    """ZeRO with small buckets."""
    return lambda: ZeROStrategy(stage=stage, **{"bucket_mb": 1e-4, **options})


def _marks(engine: str) -> list[Any]:
    missing = engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None
    return [pytest.mark.slow, pytest.mark.timeout(150), pytest.mark.skipif(missing, reason="DeepSpeed is not there")]


def others(engine: str, stages: Sequence[int], **options: Any) -> Any:
    """One engine in several stages, for one slow test."""
    return pytest.param([zero(stage, engine=engine, **options) for stage in stages], marks=_marks(engine), id=engine)


def each_of(engine: str, stages: Sequence[int]) -> list[Any]:
    """One engine in several stages, each for a slow test of its own."""
    return [pytest.param(engine, stage, marks=_marks(engine), id=f"{engine}-{stage}") for stage in stages]


# All engines in all stages: a few for one test, or one for each.
SEVERAL = [
    pytest.param([zero(stage) for stage in STAGES], id="own"), others("fsdp2", [2]), others("deepspeed", STAGES),
]  # fmt: skip
EACH = [pytest.param(zero(stage), id=f"own-{stage}") for stage in STAGES]
EACH += [pytest.param(zero(stage, engine=e), marks=_marks(e), id=f"{e}-{stage}") for stage, e in OTHERS]
