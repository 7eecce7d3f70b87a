"""Runs that fail in every place, under every strategy: what each process has seen of it, and that nothing is left.

As a script it runs them under ``start_method="popen"``, one behind the other.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_parallel.strategies import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.trainer.modules import Classifier, row_loader, rows
from tests.trainer.pipelines import make_trainer
from tests.trainer.watched import QUICK

PLAN = {"net.0": "colwise", "net.2": "rowwise"}
STRATEGIES: dict[str, Callable[..., Any]] = {
    "pipeline": lambda **more: PipelineStrategy(num_microbatches=4, patience=QUICK, **more),
    "zero_1": lambda **more: ZeROStrategy(stage=1, patience=QUICK, **more),
    "zero_2": lambda **more: ZeROStrategy(stage=2, patience=QUICK, **more),
    "zero_3": lambda **more: ZeROStrategy(stage=3, patience=QUICK, **more),
    "hybrid": lambda **more: HybridStrategy(data_parallel_size=2, patience=QUICK, **more),
    "hybrid_3": lambda **more: HybridStrategy(
        data_parallel_size=2, zero_stage=3, gather="microbatch", patience=QUICK, **more
    ),
    "tensor": lambda **more: TensorParallelStrategy(tensor_plan=PLAN, patience=QUICK, **more),
    "server": lambda **more: ParameterServerStrategy(**more),
}
DEEPSPEED: dict[str, Callable[..., Any]] = {
    "deepspeed_2": lambda **more: ZeROStrategy(stage=2, engine="deepspeed", patience=QUICK, **more),
    "deepspeed_3": lambda **more: ZeROStrategy(stage=3, engine="deepspeed", patience=QUICK, **more),
}
STAGED = ("pipeline", "hybrid", "hybrid_3", "tensor")  # whose steps are made of micro-batches
PLACES = (
    "training_step", "optimizer_step", "on_before_optimizer_step", "on_train_batch_end", "validation_step",
    "on_fit_start", "configure_optimizers", "on_train_end", "teardown", "collate", "worker", "predict_step",
)  # fmt: skip
_READY = "ready-"  # how files by which processes wait for each other begin


class Refused(Exception):
    """The user's own, which cannot be rebuilt from what it told its base class."""

    def __init__(self, place: str, code: int) -> None:
        super().__init__(f"{place} had enough")
        self.place, self.code = place, code


class Rows(Dataset):
    """Two batches; the second cannot be read on one rank, in a loader's worker."""

    def __init__(self, module: Failing) -> None:
        self.module = module

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 12:
            self.module.maybe("worker")
        x, y = rows([16])[0]
        return x[index], y[index]


class Failing(Classifier):
    """Fails on one rank, in one place, in the second batch where there are batches."""

    def __init__(self, place: str = "", rank: int = 1) -> None:
        super().__init__()
        self.place, self.rank = place, rank

    def maybe(self, place: str, when: bool = True) -> None:
        if place == self.place and self.trainer.global_rank == self.rank and when:
            raise Refused(place, 7)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.maybe("training_step", batch_idx == 1)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        self.maybe("optimizer_step", batch_idx == 1)
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.maybe("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.maybe("on_train_batch_end", batch_idx == 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.maybe("validation_step")
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.maybe("predict_step")
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        self.maybe("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.maybe("on_fit_start")

    def on_train_end(self) -> None:
        self.maybe("on_train_end")

    def teardown(self, stage: str) -> None:
        self.maybe("teardown")

    def train_dataloader(self) -> DataLoader:
        if self.place not in ("collate", "worker"):
            return row_loader()
        workers = int(self.place == "worker")
        return DataLoader(
            Rows(self),
            8,
            collate_fn=self.collate,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )

    def val_dataloader(self) -> DataLoader:
        return row_loader((8,))

    predict_dataloader = train_dataloader

    def collate(self, found: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        self.maybe("collate")
        return [torch.stack(list(part)) for part in zip(*found, strict=True)]


class Hears(Callback):
    """What `on_exception` was called with."""

    def __init__(self) -> None:
        self.heard: list[BaseException] = []

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        self.heard.append(exception)


@dataclass
class Seen:
    """What one process has seen of a run that failed."""

    strategy: str
    place: str
    kind: str
    text: str
    notes: list[str]
    same: bool  # whether `on_exception` was called once, with what was raised
    seconds: float
    left: dict[str, Any] = field(default_factory=dict)  # what is there behind the run and was not before


def fail(strategy: str, place: str, rank: int, **options: Any) -> Seen:
    """One run in this process, which has to fail."""
    hears, before, began = Hears(), _all_there_is(place), time.monotonic()
    module = Failing(place, rank)
    trainer = make_trainer((STRATEGIES | DEEPSPEED)[strategy](**options), 2, [hears], use_distributed_sampler=False)
    run = trainer.predict if place == "predict_step" else trainer.fit
    try:
        run(module)
    except BaseException as error:
        seconds = time.monotonic() - began
        notes = list(getattr(error, "__notes__", []))
        same = hears.heard == [error] and hears.heard[0] is error
        seen = Seen(strategy, place, type(error).__qualname__, str(error), notes, same, seconds)
        kept = not isinstance(error, Refused) or (error.place, error.code) == (place, 7)
    else:
        raise AssertionError(f"{strategy} did not fail in {place}")
    assert kept, "the exception's own attributes"
    del trainer, module, hears, run
    seen.left = _left(before, place)
    return seen


def _left(before: dict[str, Any], place: str) -> dict[str, Any]:
    """What a run has left; ranks whose files lie in the same folder may still be ending, and what awaits them too."""
    ends = time.monotonic() + 15.0
    while True:
        gc.collect()
        now = _all_there_is(place)
        left = {name: new for name in now if (new := _new(now[name], before[name]))}
        if not set(left) & {"files", "children"} or time.monotonic() > ends:
            return left


def _new(now: Any, before: Any) -> Any:
    return [one for one in now if one not in before] if isinstance(now, list) else now and not before


def _all_there_is(place: str) -> dict[str, Any]:
    launched = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"}  # Lightning leaves them to all
    return {
        "group": dist.is_initialized(),
        "children": sorted(child.pid or 0 for child in multiprocessing.active_children()),
        "environment": sorted((name, value) for name, value in os.environ.items() if name not in launched),
        # stacks are the harness's, a module that of PyTorch 2.9's RPC, which any import of it writes, and the others
        # Open MPI's, which Lightning's search for a cluster starts, and those of a loader's worker that was ended
        "files": sorted(
            os.path.join(folder, name)
            for folder, _, names in os.walk(tempfile.gettempdir())  # which passes over what goes meanwhile
            for name in names
            if not name.startswith(("stacks-", "_remote_module_", _READY))
            if "ompi." not in folder and not (place == "worker" and "pymp-" in folder)
        ),
    }


class Keeps(Callback):
    """The whole model's weights at the end of training, on global rank 0."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.state = dict(trainer.strategy.lightning_module_state_dict())
        if trainer.global_rank:
            self.state = {"": torch.zeros(())}


def train(strategy: str, devices: int = 2, **options: Any) -> dict[str, Tensor]:
    """A run that does not fail: its weights."""
    torch.manual_seed(1)
    module = Failing()
    made = "auto" if strategy == "auto" else (STRATEGIES | DEEPSPEED)[strategy](**options)
    trainer = make_trainer(made, devices, use_distributed_sampler=False)
    keeps = Keeps()
    trainer.callbacks.append(keeps)
    trainer.fit(module)
    found = keeps.state or module.state_dict()  # of forked ranks it came back
    return {name: value.detach().clone() for name, value in found.items() if not value.is_meta}


def _await_others(case: int, processes: int) -> None:
    """Wait until all processes have looked at what a case has left: files of the next one are none of it."""
    folder = Path(tempfile.gettempdir())
    (folder / f"{_READY}{case}-{os.getpid()}").touch()
    ends = time.monotonic() + 30.0
    while len(list(folder.glob(f"{_READY}{case}-*"))) < processes and time.monotonic() < ends:
        time.sleep(0.01)


def fail_and_train(
    cases: Sequence[tuple[str, str, int]], processes: int = 1, **options: Any
) -> tuple[list[Seen], dict[str, Any]]:
    """All cases one behind the other, then a run of each strategy that does not fail; its weights.

    Args:
        cases: strategy, place and rank of each failure.
        processes: how many do so beside each other in one temporary folder.
        options: of the strategies.
    """
    warnings.filterwarnings("ignore")
    seen = []
    for number, (strategy, place, rank) in enumerate(cases):
        seen.append(fail(strategy, place, rank, **options))
        _await_others(number, processes)
    return seen, {strategy: train(strategy, **options) for strategy in dict.fromkeys(case[0] for case in cases)}


def main() -> None:
    """As a script: what became of all cases goes into a file for each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--into", type=Path)
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(strategy, place, int(rank)) for strategy, place, rank in (case.split("/") for case in options.cases)]
    found = fail_and_train(cases, 2, start_method=options.start_method)
    (options.into / os.environ.get("LOCAL_RANK", "0")).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    from tests.trainer import failing  # what is pickled is of that module

    failing.main()
