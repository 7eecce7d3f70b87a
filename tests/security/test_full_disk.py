"""A disk that is full while a checkpoint is saved: named on all ranks, the old one whole, nothing left behind."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel import (
    HybridStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    ZeROStrategy,
)
from lightning_parallel.checkpoint import files
from lightning_parallel.checkpoint.sharded import load_sharded, save_sharded
from tests.harness import free_port, rank_outcomes
from tests.nets import models
from tests.trainer.pipelines import join_as_torchrun, make_trainer

LARGEST = 1 << 16  # bytes of a file


@contextmanager
def no_room(largest: int = LARGEST) -> Iterator[None]:
    """The system writes no more of a file than so many bytes, as it would on a disk that has no more room."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def checkpoint(size: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.ones(size)}, "optimizer_states": [], "epoch": size}


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_no_room_is_named_and_leaves_the_old_checkpoint(tmp_path: Path, kind: str):
    path = tmp_path / "a.ckpt"
    save: Callable[[int], None] = {
        "full": lambda size: files.write(checkpoint(size), path),
        "sharded": lambda size: save_sharded(checkpoint(size), ["w"], path, lambda: None),
    }[kind]
    read = {"full": files.read_checkpoint, "sharded": load_sharded}[kind]
    save(3)
    with no_room(), pytest.raises(OSError, match=r"a\.ckpt could not be written: File too large.* free; .* 390\.6 KiB"):
        save(100_000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    assert read(path)["epoch"] == 3 and torch.equal(read(path)["state_dict"]["w"], torch.ones(3))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "pipeline": lambda: PipelineStrategy(num_microbatches=2),
    "pipeline_sharded": lambda: PipelineStrategy(num_microbatches=2, state_dict_type="sharded"),
    "zero_2_sharded": lambda: ZeROStrategy(stage=2, state_dict_type="sharded"),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "hybrid_sharded": lambda: HybridStrategy(data_parallel_size=2, zero_stage=1, state_dict_type="sharded"),
    "servers": lambda: ParameterServerStrategy(),
}
NEAR = ("pipeline", "zero_2_sharded")


class Wide(models.Rows):
    """Weights that `no_room` has no room for."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*[nn.Linear(models.WIDTH, models.WIDTH) for _ in range(3)], nn.Linear(6, 3)))
        self.register_buffer("wide", torch.ones(100_000))


@pytest.mark.parametrize(
    "name", [name if name in NEAR else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_every_rank_ends_with_the_same_words(tmp_path: Path, name: str):
    path = tmp_path / "a.ckpt"

    def on_rank(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        trainer = make_trainer(STRATEGIES[name](), 2, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False)
        trainer.fit(Full(path), models.batches(1), models.batches(1))

    outcomes = rank_outcomes(on_rank, 2, free_port(), group=False, timeout=40)
    words = [str(outcome.error) for outcome in outcomes]
    assert all(isinstance(outcome.error, OSError) for outcome in outcomes), [outcome.text for outcome in outcomes]
    assert "a.ckpt could not be written: File too large" in words[0] and words[0] == words[1]
    assert max(outcome.seconds for outcome in outcomes) < 30
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    whole = load_sharded(path) if path.is_dir() else files.read_checkpoint(path)
    assert whole["global_step"] == 1 and whole["state_dict"]


class Full(Wide):
    """Saves twice, the second time without room."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)
        with no_room():
            self.trainer.save_checkpoint(self.path)
