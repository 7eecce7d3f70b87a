"""The least strategy that uses the watch and the launchers, and a module that fails where it is told to."""

import argparse
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset

from lightning_parallel.failure.patience import Patience
from lightning_parallel.failure.watch import Watch
from lightning_parallel.secret import Secret
from lightning_parallel.trainer.failure.reports import report_exception
from lightning_parallel.trainer.failure.sigterm import Restore, replace_sigterm_broadcast
from lightning_parallel.trainer.launch.launchers import make_launcher

QUICK = Patience(beat_s=0.1, stale_s=3.0, blocked_s=2.0, grace_s=1.0, exit_s=2.0, cause_s=1.0)


class WatchedStrategy(DDPStrategy):
    """DDP with a watch: what a strategy has to do for it, and no more."""

    def __init__(self, start_method: str = "fork", agrees: bool = False) -> None:
        super().__init__(start_method=start_method)  # type: ignore[arg-type]
        self.start_method, self.agrees, self.patience = start_method, agrees, None
        self.watch: Watch | None = None
        self.restore_sigterm = Restore()

    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self)

    def setup_environment(self) -> None:
        self.set_world_ranks()
        store, _, _ = next(iter(dist.rendezvous("env://", rank=self.global_rank, world_size=self.world_size)))
        secret = Secret.of_run() if self.world_size > 1 else None
        self.watch = Watch(self.global_rank, self.world_size, store, patience=QUICK, secret=secret)
        self.launcher.joined(self.watch)
        with self.watch.opening():
            group_store = dist.PrefixStore("group", store)
            dist.init_process_group("gloo", store=group_store, rank=self.global_rank, world_size=self.world_size)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        if self.agrees:
            self.restore_sigterm = replace_sigterm_broadcast(trainer, self.watch)
            assert self.restore_sigterm, "this Lightning is known"
        super().setup(trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.watch is not None and dist.is_initialized():
            with self.watch.blocked("a barrier"):
                super().barrier(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        report_exception(self, exception)

    def teardown(self) -> None:
        failed = self.watch is not None and self.watch.failure is not None
        self.restore_sigterm()
        keep = getattr(self.launcher, "keep_weights", None)
        if (
            self.watch is not None
            and not failed
            and keep
            and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        ):
            keep(self.lightning_module_state_dict)
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()
        if not getattr(self.launcher, "will_part", False):
            self.stop_watch()

    def part(self) -> None:
        if self.watch is not None:
            self.watch.part()
        self.stop_watch()

    def stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.stop()
            self.watch = None


class Rows(Dataset):
    """Rows of numbers; row ``bad`` raises."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise OSError(f"row {index} cannot be read")
        return torch.full((3,), float(index))


class Fails(LightningModule):
    """Fails on one rank in the way and in the place that it is told."""

    def __init__(self, where: str = "", rank: int = 1, how: str = "raise", bad_row: int | None = None) -> None:
        super().__init__()
        self.where, self.rank, self.how, self.bad_row = where, rank, how, bad_row
        self.layer = torch.nn.Linear(3, 1)

    def maybe(self, where: str) -> None:
        if where != self.where or self.trainer.global_rank != self.rank:
            return
        say_when()
        if self.how == "raise":
            raise KeyError(f"the user's own {where}")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), getattr(signal, self.how))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            if self.trainer.current_epoch == 0:
                os.write(1, f"rank {self.trainer.global_rank} is {os.getpid()}\n".encode())
            self.maybe("training_step")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_epoch_start(self) -> None:
        self.maybe("on_train_epoch_start")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.maybe("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def teardown(self, stage: str) -> None:
        self.maybe("teardown")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(self.bad_row), batch_size=2, num_workers=0)


def say_when() -> None:
    """Write down the moment of a failure, from which on the end of everything is timed."""
    os.write(1, f"failing at {time.monotonic()}\n".encode())


class FailsAtEnd(Callback):
    """A callback that raises on one rank."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_rank == 1:
            raise ZeroDivisionError("in a callback")


def make_trainer(strategy: Any, **kwargs: Any) -> Trainer:
    """A silent Trainer of two CPU ranks."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    settings = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **quiet, **kwargs}
    return Trainer(strategy=strategy, **settings)


def main() -> None:
    """One run as a script, for the popen launcher."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="")
    parser.add_argument("--how", default="raise")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--agrees", action="store_true")
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    if options.where == "import" and os.environ.get("LOCAL_RANK", "0") == str(options.rank):
        say_when()
        import a_module_that_is_not_installed  # noqa: F401
    if options.where == "early" and os.environ.get("LOCAL_RANK", "0") == str(options.rank):
        raise SystemExit(0)
    trainer = make_trainer(WatchedStrategy(options.start_method, options.agrees), max_epochs=options.epochs)
    trainer.fit(Fails(options.where, options.rank, options.how))
    os.write(1, f"rank {trainer.global_rank} has trained\n".encode())  # in one piece, as both ranks write there


if __name__ == "__main__":
    main()
