"""What ranks have in common after a failure, for `on_exception` to save: the state behind the last whole step.

The one idea: the connections of the run are closed by then, so the ranks meet at the store, say how far each has come,
and open new ones only where all are there and as far. Left out: what is gathered then, as in any checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parallel.failure.watch import Watch
from lightning_parallel.mesh import connect, disconnect, open_groups
from lightning_parallel.strategies.axes import MeshAxes
from lightning_parallel.trainer.failure.exception_hooks import LastWords

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

_COME = timedelta(seconds=15)  # how long ranks are awaited: until one that waits for another is freed, and more
_TALK = timedelta(seconds=25)
_BEFORE_THE_UPDATE = ("on_before_optimizer_step", "configure_gradient_clipping")  # hooks that run with gradients whole


class SavesAfterFailure(MeshAxes):
    """The part of a strategy that lets hooks hear of a failure, and save."""

    watch: Watch | None
    _store: dist.Store | None = None
    _updates, _is_updating = 0, False  # optimizer's steps made here, and whether one is being made
    _meetings = 0  # after the failure
    _is_saving = False
    _failed_in = ""  # the hook
    _last_words: LastWords | None = None

    def guard(self, trainer: Trainer, is_rank: bool = True) -> None:
        """The run has failed, and this process's main thread is free: what comes now are hooks that hear of it.

        Args:
            trainer: whose run it is.
            is_rank: whether this process is a rank of it, and did not only start the ranks.
        """
        if self.watch is not None:
            self.watch.stop()
        if is_rank and self.world_size > 1:  # whose connections are closed: hooks wait for nobody
            disconnect(failed=True)
        self._failed_in = getattr(self.lightning_module, "_current_fx_name", None) or ""
        if self._last_words is None:
            self._last_words = LastWords(trainer, self.saving if is_rank else None, self._failure)

    def hooks_are_over(self) -> None:
        """Give the hooks back, for `teardown` to call."""
        if self._last_words is not None:
            self._last_words.restore()
            self._last_words = None

    def _failure(self) -> BaseException | None:
        return None if self.watch is None else self.watch.cause(0.0)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's; what is between the closure and its end is no state of a whole step."""

        def compute() -> Any:
            value = closure()
            self._is_updating = True
            return value

        result = super().optimizer_step(optimizer, compute, model, **kwargs)
        self._updates, self._is_updating = self._updates + 1, False
        return result

    @contextmanager
    def saving(self, trainer: Trainer) -> Iterator[str]:
        """A context in which the ranks are connected once more; gives why not, or ""."""
        why = self._why_not_alone(trainer)
        if self.world_size > 1:
            why = self._why_not_together(why)
        if why or self.world_size == 1:
            self._is_saving = True
            try:
                if not why:
                    self.prepare_saving()
                yield why
            finally:
                self._is_saving = False
            return
        assert self._store is not None
        store = dist.PrefixStore(f"saving_{self._meetings}", self._store)
        try:
            connect(store, self.global_rank, self.world_size, torch.device("cpu"), _TALK)
            self._groups, self._barriers, self._is_saving = open_groups(self.axes(), self.planes), None, True
            self.prepare_saving()
            yield ""
        finally:
            self._is_saving = False
            disconnect(failed=True)

    def prepare_saving(self) -> None:
        """Bring what a step was about back to what it is between steps."""

    def _why_not_alone(self, trainer: Trainer) -> str:
        """Why this rank has no state to save."""
        is_before = self._failed_in in _BEFORE_THE_UPDATE
        if trainer.state.fn == TrainerFn.FITTING and self._is_updating and not is_before:
            return f"rank {self.global_rank} failed within the optimizer's step, and its state is of no whole one"
        return ""

    def _why_not_together(self, mine: str) -> str:
        """Meet the other ranks at the store; why they have no state in common.

        Args:
            mine: why this rank has none.
        """
        failure = None if self.watch is None else self.watch.failure
        if failure is None or self._store is None:
            return "the ranks were not connected yet"
        if failure.error is None:
            return failure.headline.partition("\n")[0].rstrip(":")
        self._meetings += 1
        keys = [f"saving/{self._meetings}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.global_rank], json.dumps([mine, self._updates]))
            self._store.wait(keys, _COME)
            told = [json.loads(self._store.get(key)) for key in keys]
        except (dist.DistError, RuntimeError):
            return (
                f"every rank has to call trainer.save_checkpoint after a failure, and in {_COME.seconds} s not all did"
            )
        updates = [count for _, count in told]
        if reason := next((why for why, _ in told if why), ""):
            return str(reason)
        if min(updates) != max(updates):
            steps = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(updates))
            return f"ranks have made different numbers of the optimizer's steps ({steps})"
        return ""
