"""A pipeline that fails anywhere ends everywhere, with stage, rank and micro-batch."""

import os
import signal
import threading
import time

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel.errors import StageError
from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, new_children, rank_outcomes
from tests.trainer.pipelines import join_as_torchrun
from tests.trainer.watched import QUICK, make_trainer


class Fuse(nn.Module):
    """A block that does something bad in its n-th forward or backward of a step."""

    def __init__(self, how, at=2, direction="forward"):
        super().__init__()
        self.how, self.at, self.direction, self.seen = how, at, direction, 0
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if not self.training:
            return self.layer(x)
        y = self.layer(x)
        if self.direction == "backward":
            y.register_hook(lambda gradient: self.burn())
        else:
            self.burn()
        return y

    def burn(self):
        self.seen += 1
        if self.seen <= self.at or self.how is None:
            return
        if self.how == "raise":
            raise ValueError("label 7 is out of range")
        if self.how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), getattr(signal, self.how))


class Chain(LightningModule):
    def __init__(self, *fuses):
        super().__init__()
        self.blocks = nn.Sequential(*fuses)

    def training_step(self, batch):
        loss = self.blocks(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4)), batch_size=8)


def fit(model, **options) -> Trainer:
    strategy = PipelineStrategy(
        schedule="1f1b", num_microbatches=4, start_method="fork", patience=QUICK, check_loss=False, **options
    )
    trainer = make_trainer(strategy)
    trainer.fit(model)
    return trainer


def failure_of(model, kind: type[BaseException] = StageError, **options) -> BaseException:
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        fit(model, **options)
    assert type(caught.value) is kind
    assert time.monotonic() - started < 15.0
    assert not new_children()
    return caught.value


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1])
def test_stage_rank_and_microbatch_are_named(stage, direction):
    fuses = [Fuse("raise" if place == stage else None, 2, direction) for place in range(2)]
    error = failure_of(Chain(*fuses), ValueError)
    assert str(error) == "label 7 is out of range"
    assert error.__notes__[0].startswith(f"on rank {1 - stage}:\nTraceback")
    what = f"the {direction} of micro-batch 2"
    assert error.__notes__[1:] == [
        f"stage {stage} (rank {1 - stage}) failed in {what}\n(rank {stage} stopped because of it)"
    ]


def test_running_out_of_memory_is_an_exception_like_others():
    error = failure_of(Chain(Fuse("memory"), Fuse(None)), torch.OutOfMemoryError)
    assert str(error).startswith("CUDA out of memory. Tried")
    assert error.__notes__[-1].startswith("stage 0 (rank 1) failed in the forward of micro-batch 2\n")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_is_named(stage):
    error = failure_of(Chain(*(Fuse("SIGKILL" if place == stage else None) for place in range(2))))
    assert str(error) == (
        f"lost rank {1 - stage} (stage {stage}): its process ended (SIGKILL: the out-of-memory killer?)\n"
        f"(rank {stage} stopped because of it)"
    )


def test_a_stopped_stage_is_lost():
    assert "lost rank 1 (stage 0): not heard of for 3 s" in str(failure_of(Chain(Fuse("SIGSTOP"), Fuse(None))))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_that_fails_on_one_rank_is_named(rank):
    class Chain1(Chain):
        def train_dataloader(self):
            bad = 9 if self.trainer.global_rank == rank else None
            return DataLoader([Row(index, bad) for index in range(16)], batch_size=8, collate_fn=read)

    error = failure_of(Chain1(Fuse(None), Fuse(None)), OSError)
    assert error.__notes__[-1].startswith(f"stage {1 - rank} (rank {rank}) failed in the data loader (epoch 0, batch ")
    assert str(error) == "row 9 cannot be read"


class Row:
    def __init__(self, index, bad):
        self.index, self.bad = index, bad


def read(rows):
    for row in rows:
        if row.index == row.bad:
            raise OSError(f"row {row.index} cannot be read")
    return [torch.stack([torch.full((4,), float(row.index)) for row in rows])]


@pytest.mark.parametrize(
    "hook", ["configure_optimizers", "on_train_start", "on_before_optimizer_step", "on_train_epoch_end"]
)
def test_a_hook_that_fails_on_one_rank_is_named(hook):
    def fail(self, *args):
        if self.trainer.global_rank == 1:
            raise KeyError(hook)
        return Chain.configure_optimizers(self) if hook == "configure_optimizers" else None

    model = type("Hooked", (Chain,), {hook: fail})(Fuse(None), Fuse(None))
    error = failure_of(model, KeyError)
    assert error.args == (hook,)
    assert error.__notes__[-1].startswith(f"stage 0 (rank 1) failed in {hook}")


@pytest.mark.parametrize("hook", ["on_fit_end", "teardown"])
def test_a_hook_after_the_run_that_fails_on_one_rank_ends_all(hook):
    """Where another program started the ranks (torchrun), each has its own exit code."""

    def fail(self, **stage):
        if self.trainer.global_rank == 1:
            raise KeyError(hook)

    def run(rank, port):
        join_as_torchrun(rank, 2, port)
        model = type("Hooked", (Chain,), {hook: fail})(Fuse(None), Fuse(None))
        trainer = make_trainer(PipelineStrategy(num_microbatches=4, patience=QUICK, check_loss=False))
        trainer.fit(model)

    for outcome in rank_outcomes(run, 2, free_port(), group=False):
        assert type(outcome.error) is KeyError
        assert outcome.error.args == (hook,)
        assert outcome.error.__notes__[-1] == (f"stage 0 (rank 1) failed in {hook}\n(rank 0 stopped because of it)")


def test_all_weights_come_back_to_the_parent():
    model = Chain(Fuse(None), Fuse(None))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = fit(model)
    assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
    assert torch.isfinite(trainer.callback_metrics["loss"])
