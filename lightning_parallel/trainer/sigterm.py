"""SIGTERM without a rendezvous and a device synchronisation before every batch.

The one idea: Lightning broadcasts rank 0's flag over the default group before every training batch and reads it from
the device. What has to be agreed is one bit on the host, which may arrive some steps late: every n-th batch starts a
reduction over a host-side group and reads the one started n batches before. So all ranks see a signal in the same step,
whichever rank got it, and none waits for another. A Lightning that has changed these methods is left alone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOOP_METHOD, _HANDLER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"
_LAST_VOTE = timedelta(seconds=2)


class Restore:
    """Undoes a replacement: call it at teardown, once."""

    def __init__(self, agreement: _Agreement | None = None, undo: tuple[Callable[[], None], ...] = ()) -> None:
        self._agreement, self._undo = agreement, undo

    def __bool__(self) -> bool:
        """Whether anything was replaced."""
        return bool(self._undo)

    def __call__(self, failed: bool = False) -> None:
        """Put Lightning's own methods back; without a failure, wait for the last vote before its group is closed."""
        for undo in self._undo:
            undo()
        if self._agreement is not None and not failed:
            self._agreement.close()
        self._agreement, self._undo = None, ()


def replace_sigterm_broadcast(trainer: Trainer, group: Any, every_n_steps: int = 10) -> Restore:
    """Have the ranks agree on SIGTERM over a host-side group, every n batches, without waiting for each other.

    Args:
        trainer: before its run registers signal handlers, as in `Strategy.setup_environment` or `Strategy.setup`.
        group: a gloo group of all ranks that nothing else uses.
        every_n_steps: a signal ends the run at most 2n batches later.

    Returns:
        What undoes it; false if this version of Lightning is not one that we know.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if not _is_known(loop, connector):
        return Restore()
    agreement = _Agreement(trainer, group, every_n_steps)
    loop.__dict__[_LOOP_METHOD] = agreement.before_batch
    connector.__dict__[_HANDLER] = agreement.on_signal
    undo = tuple(_remover(owner.__dict__, name) for owner, name in ((loop, _LOOP_METHOD), (connector, _HANDLER)))
    return Restore(agreement, undo)


class _Agreement:
    """One bit a rank, reduced over all of them every n batches."""

    def __init__(self, trainer: Trainer, group: Any, every_n_steps: int) -> None:
        self._trainer, self._group, self._every = trainer, group, max(1, every_n_steps)
        self._signalled, self._batches = False, 0
        self._vote: tuple[Any, torch.Tensor] | None = None

    def before_batch(self) -> None:
        """Stands in for the loop's own method: raises on all ranks before the same batch."""
        self._batches += 1
        if self._batches % self._every:
            return
        if self._agreed():
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
        flag = torch.tensor([float(self._signalled)])
        self._vote = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag

    def on_signal(self, signum: int, frame: Any) -> None:
        """Stands in for the handler, which would broadcast in the middle of whatever this rank is doing."""
        if not self._signalled and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signal.Signals(signum))
        self._signalled = True
        if not self._trainer.training:  # no batch is coming in which to agree
            self._trainer._signal_connector.received_sigterm = True

    def close(self) -> None:
        with suppress(Exception):
            if self._vote is not None:
                self._vote[0].wait(_LAST_VOTE)
        self._vote = None

    def _agreed(self) -> bool:
        if self._vote is None:
            return False
        work, flag = self._vote
        if not work.is_completed():
            watch = getattr(self._trainer.strategy, "watch", None)
            with nullcontext() if watch is None else watch.blocked("the other ranks, to agree on SIGTERM"):
                work.wait()
        return bool(flag)


def _is_known(loop: Any, connector: Any) -> bool:
    """Whether both methods are there, are methods of the class, and do with a flag what ours do."""
    method, handler = getattr(type(loop), _LOOP_METHOD, None), getattr(type(connector), _HANDLER, None)
    if not isinstance(method, FunctionType) or not isinstance(handler, FunctionType):
        return False
    if _LOOP_METHOD in loop.__dict__ or _HANDLER in connector.__dict__:
        return False
    counts = (method.__code__.co_argcount, handler.__code__.co_argcount)
    names = (method.__code__.co_names, handler.__code__.co_names)
    return counts == (1, 3) and "broadcast" in names[0] and "received_sigterm" in names[1]


def _remover(attributes: dict, name: str) -> Callable[[], None]:
    return lambda: attributes.pop(name, None)
