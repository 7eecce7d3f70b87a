"""SIGTERM without a rendezvous and a device synchronisation before every batch.

The one idea: Lightning broadcasts rank 0's flag over the default group before every training batch and reads it from
the device. Here the watch's threads agree on the last batch (``failure/last_batch.py``) once a rank gets the signal;
until then a batch costs a lock that nobody else holds. A Lightning that has changed these methods is left alone.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.failure.watch import Watch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOOP_METHOD, _HANDLER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"
_log = logging.getLogger(__name__)


class Restore:
    """Undoes a replacement: call it at teardown, once."""

    def __init__(self, undo: tuple[Callable[[], None], ...] = ()) -> None:
        self._undo = undo

    def __bool__(self) -> bool:
        """Whether anything was replaced."""
        return bool(self._undo)

    def __call__(self) -> None:
        """Put Lightning's own methods back."""
        for undo in self._undo:
            undo()
        self._undo = ()


def replace_sigterm_broadcast(trainer: Trainer, watch: Watch) -> Restore:
    """Have the ranks agree on SIGTERM through their watches, without waiting for each other.

    Args:
        trainer: before its run registers signal handlers, as in `Strategy.setup_environment` or `Strategy.setup`.
        watch: of this rank. A signal to any ends all of them behind the batch that is under way, or one that another
            rank has begun by then.

    Returns:
        What undoes it; false if this version of Lightning is not one that we know.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if not _is_known(loop, connector):
        return Restore()
    agreement = _Agreement(trainer, watch)
    loop.__dict__[_LOOP_METHOD] = agreement.before_batch
    connector.__dict__[_HANDLER] = agreement.on_signal
    removers = [_remover(of.__dict__, name) for of, name in ((loop, _LOOP_METHOD), (connector, _HANDLER))]
    return Restore((*removers, agreement.close))


class _Agreement:
    """Stands in for what Lightning does about SIGTERM."""

    def __init__(self, trainer: Trainer, watch: Watch) -> None:
        self._trainer, self._watch, self._signalled, self._is_over = trainer, watch, False, False
        watch.last_batch.on_last = self._end

    def before_batch(self) -> None:
        """Stands in for the loop's own method: raises on all ranks before the same batch."""
        if not self._watch.begin_batch():
            self._end()
            raise SIGTERMException

    def on_signal(self, signum: int, frame: Any) -> None:
        """Stands in for the handler, which would broadcast in the middle of whatever this rank is doing."""
        if not self._signalled and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signal.Signals(signum))
        self._signalled = True
        self._watch.ask_to_end()
        if self._is_over or not self._trainer.training:  # no batch is coming behind which to end
            self._trainer._signal_connector.received_sigterm = True

    def close(self) -> None:
        """The strategy is torn down; Lightning's table of handlers holds `on_signal` a moment longer."""
        self._is_over = True

    def _end(self) -> None:
        """The last batch has begun: Lightning ends the run behind it."""
        self._trainer._signal_connector.received_sigterm = True


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
