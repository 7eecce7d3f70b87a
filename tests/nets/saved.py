"""The checkpoints that lie beside this file: what wrote each, what reads it, and what then has to happen.

The one idea: a run of four epochs is cut after two. What a checkpoint is resumed to is what the run without a cut came
to when it was written: losses, weights, the optimizer's states (`expected.json`, sums and norms). What is written today
is what was written then, entry by entry.
"""

from __future__ import annotations

import json
import math
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from lightning_parallel.parameter_server.filters import TopK
from lightning_parallel.strategies import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.harness import free_port, run_ranks
from tests.nets import models
from tests.nets.layouts import ADAM, BF16, CLOSE
from tests.trainer.pipelines import join_as_torchrun, make_trainer

FOLDER = Path(__file__).parent / "checkpoints"
BEFORE, AFTER, BATCHES = 2, 4, 2  # epochs before the cut and in all, batches of an epoch
SMALL = {"bucket_mb": 1e-3}
SHARDED = {"state_dict_type": "sharded"}


def rows() -> LightningModule:
    """Four layers of the smallest files."""
    return models.Rows(models.layers(norms=False))


def adam_rows() -> LightningModule:
    """The same under AdamW."""
    return models.AdamRows(models.layers(norms=False))


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Args:
        make: builds the strategy that wrote it and resumes from it.
        ranks: how many processes run that; all of them see the same rows.
        model: builds the module.
        trainer: options of the Trainer.
        callbacks, plugins: build callbacks and plugins.
        plain: whether a plain Trainer resumes from it too: it is one file, of a run that one process can have.
        others: layouts by name that resume from it too (see `OTHERS`).
        certain: whether two runs of it are equal; not so with several workers that do not wait for each other.
        tolerance: of what a resumed run comes to.
        slow: whether `make test` leaves it out.
        engine: the package of others, if any, that has to be there.
        there: whether this Lightning has the callbacks.
    """

    make: Callable[[], Any]
    ranks: int = 2
    model: Callable[[], LightningModule] = adam_rows
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    plugins: Callable[[], list[Any]] = list
    plain: bool = True
    others: Sequence[str] = ()
    certain: bool = True
    tolerance: Mapping[str, float] = field(default_factory=lambda: CLOSE)
    slow: bool = True
    engine: str = ""
    there: bool = True


class LBFGSRows(models.Rows):
    """Steps of all rows together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=2)


def lbfgs_rows() -> LightningModule:
    """The same under L-BFGS."""
    return LBFGSRows(models.layers(norms=False))


def tiny_gpt() -> LightningModule:
    """Two blocks of four features."""
    return models.gpt(num_blocks=2, width=4)


def pipeline(schedule: str = "1f1b", **options: Any) -> Callable[[], Any]:
    return lambda: PipelineStrategy(schedule=schedule, **{"num_microbatches": 4, **options})


def zero(stage: int, **options: Any) -> Callable[[], Any]:
    return lambda: ZeROStrategy(stage=stage, **{**SMALL, **options})


def hybrid(data: int = 1, stages: int = 1, tensor: int = 1, **options: Any) -> Callable[[], Any]:
    sizes = {"data_parallel_size": data, "pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    return lambda: HybridStrategy(**sizes, **{"num_microbatches": 2, **SMALL, **options})


def servers(consistency: str = "bsp", **options: Any) -> Callable[[], Any]:
    return lambda: ParameterServerStrategy(consistency, **{"lease": 30.0, **options})


def scaled() -> list[Any]:
    """Mixed precision of 16 bits on CPUs, whose scale of the loss grows in the run."""
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3))]


def ema() -> list[Callback]:
    """Lightning has it from version 2.6 on."""
    return [callbacks.EMAWeightAveraging(decay=0.5)]


def swa() -> list[Callback]:
    return [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]


# What resumes from checkpoints of others, on two ranks.
OTHERS: dict[str, Callable[[], Any]] = {
    "pipeline": pipeline("zb_v"),
    "pipeline of two stages": pipeline(),
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "hybrid zero 3": hybrid(2, zero_stage=3),
    "servers": servers(),
}
ANY = tuple(OTHERS)
DIVIDED = tuple(name for name in OTHERS if name != "servers")  # who reads folders
SGD = {"model": rows}
TWO_BLOCKS = tuple(name for name in DIVIDED if name != "pipeline")  # zb_v has four stages
TINY = {"model": tiny_gpt, "tolerance": ADAM}
HALF = {"trainer": {"precision": "bf16-true"}, "plain": False, "tolerance": BF16}
IN_64_BITS = {"rtol": 1e-4, "atol": 2e-5}  # servers make L-BFGS's steps in 64 bits, one process in 32
STALE = {"certain": False, **SGD}

SAVED: dict[str, Saved] = {
    "one_process": Saved(lambda: "auto", 1, others=ANY),
    # pipelines
    "pipeline_full": Saved(pipeline(), others=("zero 2", "hybrid zero 3", "servers"), slow=False),
    "pipeline_sharded": Saved(pipeline(**SHARDED), plain=False, others=DIVIDED, slow=False),
    "pipeline_zb_v_sgd": Saved(pipeline("zb_v"), **SGD, others=ANY),
    "pipeline_chimera_sharded": Saved(pipeline("chimera", **SHARDED), plain=False, others=("zero 1",)),
    "pipeline_float16": Saved(pipeline(), plugins=scaled, tolerance=BF16),
    "zero_2_float16": Saved(zero(2), plugins=scaled, tolerance=BF16),
    "pipeline_averages": Saved(pipeline(), callbacks=swa),
    "pipeline_running_average": Saved(pipeline(), callbacks=ema, there=hasattr(callbacks, "EMAWeightAveraging")),
    "pipeline_two_copies": Saved(pipeline(data_parallel_size=2), 4),
    # ZeRO
    "zero_1_full": Saved(zero(1), others=ANY),
    "zero_1_sharded": Saved(zero(1, **SHARDED), plain=False, others=DIVIDED),
    "zero_2_full": Saved(zero(2), others=("pipeline",), slow=False),
    "zero_2_sharded": Saved(zero(2, **SHARDED), plain=False, others=DIVIDED, slow=False),
    "zero_2_masters": Saved(zero(2), **HALF, slow=False),
    "zero_2_masters_sharded": Saved(zero(2, **SHARDED), **HALF),
    "zero_2_averages": Saved(zero(2), callbacks=swa),
    "zero_2_fsdp2_full": Saved(zero(2, engine="fsdp2"), others=ANY),
    "zero_2_fsdp2_sharded": Saved(zero(2, engine="fsdp2", **SHARDED), plain=False, others=DIVIDED),
    "zero_3_fsdp2_full": Saved(zero(3), others=ANY, slow=False),
    "zero_3_fsdp2_sharded": Saved(zero(3, **SHARDED), plain=False, others=DIVIDED),
    "zero_3_fsdp2_running_average": Saved(zero(3), callbacks=ema, there=hasattr(callbacks, "EMAWeightAveraging")),
    "zero_3_fsdp2_masters": Saved(zero(3), **HALF),
    **{
        f"zero_{stage}_deepspeed_{kind}": Saved(
            zero(stage, engine="deepspeed", state_dict_type=kind),
            plain=kind == "full",
            others=("zero 2",),
            engine="deepspeed",
        )
        for stage in (1, 2, 3)
        for kind in ("full", "sharded")
    },
    "zero_2_deepspeed_masters": Saved(zero(2, engine="deepspeed"), **HALF, engine="deepspeed"),
    # meshes
    **{f"hybrid_2x1x1_zero_{stage}": Saved(hybrid(2, zero_stage=stage), others=("zero 2",)) for stage in (0, 1, 2)},
    "hybrid_2x1x1_zero_3": Saved(hybrid(2, zero_stage=3), others=("pipeline", "servers"), slow=False),
    "hybrid_2x1x1_zero_3_sharded": Saved(hybrid(2, zero_stage=3, **SHARDED), plain=False, others=DIVIDED, slow=False),
    "hybrid_2x1x1_zero_3_masters": Saved(hybrid(2, zero_stage=3), **HALF),
    "hybrid_2x2x1_zero_1_sharded": Saved(hybrid(2, 2, zero_stage=1, schedule="zb_v", **SHARDED), 4, plain=False),
    "hybrid_2x2x1_zero_2": Saved(hybrid(2, 2, zero_stage=2), 4),
    "hybrid_2x1x2_zero_3_sharded": Saved(hybrid(2, 1, 2, zero_stage=3, **SHARDED), 4, **TINY, plain=False),
    "hybrid_1x2x2": Saved(hybrid(1, 2, 2), 4, **TINY),
    "hybrid_2x2x2_zero_1": Saved(hybrid(2, 2, 2, zero_stage=1), 8, **TINY),
    # tensor
    "tensor_full": Saved(TensorParallelStrategy, **TINY, others=("zero 2", "pipeline of two stages"), slow=False),
    "tensor_sharded": Saved(lambda: TensorParallelStrategy(**SHARDED), **TINY, plain=False, others=TWO_BLOCKS),
    # parameter servers
    "servers_bsp": Saved(servers(num_servers=2), **SGD, others=("zero 2", "pipeline"), slow=False, engine="zmq"),
    "servers_bsp_adam": Saved(servers(num_servers=2, replication=2), engine="zmq"),
    "servers_bsp_filtered": Saved(servers(filters=[TopK(0.25)], num_servers=2), **SGD, plain=False, engine="zmq"),
    "servers_bsp_worker_steps": Saved(servers(update="worker"), **SGD, engine="zmq"),
    "servers_ssp": Saved(servers("ssp", staleness=1), **STALE, engine="zmq"),
    "servers_async": Saved(servers("async"), **STALE, engine="zmq"),
    "servers_ssp_one_worker": Saved(servers("ssp"), 1, **SGD, engine="zmq"),
    "servers_sandblaster": Saved(servers("sandblaster"), model=lbfgs_rows, tolerance=IN_64_BITS, engine="zmq"),
    "servers_in_an_island": Saved(servers("ssp", island_size=2), **SGD, engine="zmq"),
}


def archive_of(name: str) -> Path:
    """The committed archive, in which a file or a folder lies (which is a sixth as large so)."""
    return FOLDER / f"{name}.tar.xz"


def pack(name: str, path: Path) -> None:
    """Put what was written at a path into the archive."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode = 0, 0, 0, "", "", 0o755
        return info

    with tarfile.open(archive_of(name), "w:xz") as archive:
        archive.add(path, "checkpoint", filter=plain)


def unpack(name: str, folder: Path) -> Path:
    """The checkpoint, brought into a folder once."""
    path = folder / f"{name} as committed"
    if not path.exists():
        with tarfile.open(archive_of(name)) as archive, tempfile.TemporaryDirectory(dir=folder) as place:
            archive.extractall(place, filter="data")
            (Path(place) / "checkpoint").rename(path)
    return path


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What became of a run on one rank; states are rank 0's."""

    losses: list[float] = field(default_factory=list)
    progress: dict[str, int] = field(default_factory=dict)
    begun_with: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


class Watch(Callback):
    """Fills a `Found`, and saves where the run is to be cut, or again where it begins."""

    def __init__(self, save: Path | None, again: Path | None) -> None:
        self.found, self.save, self.again = Found(), save, again

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.found.progress = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        if trainer.global_step:
            self.found.begun_with = flat(states(trainer))
        if self.again is not None:
            trainer.save_checkpoint(self.again)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.found.losses.append(float(outputs["loss"].detach()))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        of_all = states(trainer)
        self.found.weights = flat(of_all["state_dict"])
        self.found.optimizer = flat(of_all["optimizer_states"])

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.save is not None and trainer.current_epoch == BEFORE - 1:
            trainer.save_checkpoint(self.save)


def states(trainer: Trainer) -> dict[str, Any]:
    """Weights and states of the optimizers, as a checkpoint has them."""
    optimizers = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
    return {"state_dict": trainer.strategy.lightning_module_state_dict(), "optimizer_states": optimizers}


def fit(
    saved: Saved,
    strategy: Any,
    devices: int,
    save: Path | None = None,
    resume: Path | None = None,
    again: Path | None = None,
) -> Found:
    """A run in this process, to its end.

    Args:
        saved: what is run.
        strategy, devices: of the Trainer.
        save: where to write a checkpoint after `BEFORE` epochs.
        resume: what to resume from.
        again: where to write at once what was resumed from.
    """
    torch.manual_seed(1)
    module, watch = saved.model(), Watch(save, again)
    options = {"max_epochs": AFTER, "limit_val_batches": 0, "use_distributed_sampler": False, **saved.trainer}
    if saved.plugins():
        options["plugins"] = saved.plugins()
    trainer = make_trainer(strategy, devices, [*saved.callbacks(), watch], **options)
    loader = models.batches(BATCHES)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return watch.found


@dataclass(frozen=True)
class Job:
    """A run to be launched: of a checkpoint by name, under its own strategy or another by name."""

    name: str
    save: Path | None = None
    resume: Path | None = None
    again: Path | None = None
    other: str = ""


def launched(jobs: Sequence[Job], timeout: float = 100.0) -> list[list[Found]]:
    """Runs of equally many ranks, one after the other in one launch; for each one `Found` a rank."""
    [ranks] = {2 if job.other else SAVED[job.name].ranks for job in jobs}

    def on_rank(rank: int, ports: Sequence[int]) -> list[Found]:
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
        return [_run(job, rank, port, ranks) for job, port in zip(jobs, ports, strict=True)]

    found = run_ranks(on_rank, ranks, [free_port() for _ in jobs], group=False, timeout=timeout)
    return [list(of_job) for of_job in zip(*found, strict=True)]


def _run(job: Job, rank: int, port: int, ranks: int) -> Found:
    saved = SAVED[job.name]
    join_as_torchrun(rank, ranks, port)
    strategy = (OTHERS[job.other] if job.other else saved.make)()
    try:
        return fit(saved, strategy, ranks, job.save, job.resume, job.again)
    except BaseException as error:
        error.__notes__ = [*getattr(error, "__notes__", []), f"in {job}"]  # type: ignore[attr-defined]
        raise


# -- what is compared --------------------------------------------------------------------------------------------------


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested mappings and lists, by their way from the root; tensors are copies."""
    if isinstance(tree, Mapping):
        pairs = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)  # type: ignore[assignment]
    else:
        return {name: tree.detach().clone() if isinstance(tree, Tensor) else tree}
    found: dict[str, Any] = {} if pairs or not name else {name: type(tree).__name__}
    for key, value in pairs:
        found |= flat(value, f"{name}/{key}" if name else str(key))
    return found


def whole(found: Sequence[Found], what: str) -> dict[str, Any]:
    """The leaves that any rank has, the first one's first; stand-ins for what others hold are left out.

    With a tensor axis and sharded checkpoints a rank tells its part of what is cut: see `whole_shapes`.
    """
    leaves: dict[str, Any] = {}
    for one in found:
        for name, value in getattr(one, what).items():
            if not (isinstance(value, Tensor) and value.is_meta):
                leaves.setdefault(name, value)
    return leaves


def whole_shapes(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those weights that are whole."""
    shapes = {leaf: value.shape for leaf, value in SAVED[name].model().state_dict().items()}
    return {leaf: value for leaf, value in weights.items() if value.shape == shapes[leaf]}


def read(path: Path) -> dict[str, Any]:
    """The leaves of a file; of a folder what is stored of each tensor, its values, and the leaves of all else."""
    if path.is_file():
        return flat(torch.load(path, weights_only=False))
    reader = FileSystemReader(path)
    kinds = reader.read_metadata().state_dict_metadata
    found = {f"file/{name}": True for name in sorted(entry.name for entry in path.iterdir())}
    for name, kind in kinds.items():
        chunks = getattr(kind, "chunks", ())
        found[f"chunks/{name}"] = [[tuple(chunk.offsets), tuple(chunk.sizes)] for chunk in chunks]
    values = {n: torch.empty(k.size, dtype=k.properties.dtype) for n, k in kinds.items() if hasattr(k, "size")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is no process group
        torch.distributed.checkpoint.load(values, storage_reader=reader, no_dist=True)
    return found | values | flat(torch.load(path / "meta.pt", weights_only=False), "meta")


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: Mapping[str, float] | None) -> list[str]:
    """Leaves that only one has, that are of other kinds, or further apart than a tolerance (None: only of kinds)."""
    found = [f"{name} is new" for name in ours.keys() - theirs.keys()]
    found += [f"{name} is missing" for name in theirs.keys() - ours.keys()]
    for name in (name for name in theirs if name in ours):
        mine, other = ours[name], theirs[name]
        if isinstance(other, Tensor) and isinstance(mine, Tensor):
            if (mine.shape, mine.dtype) != (other.shape, other.dtype):
                found.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, was {other.dtype} {tuple(other.shape)}")
            elif tolerance is not None and not torch.allclose(mine, other, **tolerance, equal_nan=True):
                found.append(f"{name}: apart by {(mine - other).abs().max()}")
        elif type(mine) is not type(other):
            found.append(f"{name}: a {type(mine).__name__}, was a {type(other).__name__}")
        elif tolerance is not None and not _alike(mine, other, tolerance):
            found.append(f"{name}: {mine!r}, was {other!r}")
    return found


def _alike(mine: Any, other: Any, tolerance: Mapping[str, float]) -> bool:
    close = isinstance(other, float) and math.isclose(mine, other, rel_tol=tolerance["rtol"], abs_tol=tolerance["atol"])
    return close or mine == other


def summed(leaves: Mapping[str, Any]) -> dict[str, list[float]]:
    """Sum and norm of each tensor, for JSON."""
    return {
        name: [float(value.double().sum()), float(value.double().norm())]
        for name, value in leaves.items()
        if isinstance(value, Tensor)
    }


def expected() -> dict[str, Any]:
    """What was written down of runs without a cut, by name."""
    return json.loads((FOLDER / "expected.json").read_text())
