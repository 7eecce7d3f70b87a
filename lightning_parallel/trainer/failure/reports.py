"""From an exception anywhere in a Trainer run to the failure that all ranks are told of.

The one idea: hooks, callbacks, loaders and `configure_optimizers` need no guard of their own, since whatever they raise
passes through the launcher, and Lightning still knows there which hook it was in. What goes on to Lightning is what
callbacks hear of in `on_exception`, and what the user's `except` sees.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from lightning_parallel.errors import notes_of, raise_told
from lightning_parallel.pipeline.phantoms.errors import PhantomError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Hooks that run once, for which the loop's counters say nothing.
_ONCE = (
    "on_fit_",
    "on_train_start",
    "on_train_end",
    "setup",
    "teardown",
    "configure_",
    "prepare_data",
    "train_dataloader",
)

_CUT_SHORT = (
    ", on a rank where steps do not run to their end (what a step appends or sets is there on rank 0 only: log it in"
    " the step, or use a torchmetrics object)"
)

_TOLD_TO_END = 128 + signal.SIGTERM  # the exit code of a process that ends because of it
_log = logging.getLogger(__name__)


class reported:
    """A context in which any exception is reported to all ranks; what leaves it is the failure of the run.

    That is the exception itself, or another rank's, which came first. Before the strategy has a watch (a mistake in the
    Trainer's arguments) exceptions stay as they are.

    Args:
        strategy: its attribute ``watch`` is told. Its ``guard``, if there is one, is called with the Trainer.
        trainer: whose run it is.
    """

    def __init__(self, strategy: Any, trainer: Trainer | None) -> None:
        self._strategy, self._trainer = strategy, trainer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, _TunerExitException):
            return
        told = tell(self._strategy, self._trainer, error) or error
        show_notes(told)
        if self._trainer is not None and hasattr(self._strategy, "guard"):
            self._strategy.guard(self._trainer)
        if told is not error and isinstance(error, Exception):
            raise_told(told, error)


def tell(strategy: Any, trainer: Trainer | None, error: BaseException) -> BaseException | None:
    """Report an exception to all ranks; None where there is no watch to report to."""
    if isinstance(error, SIGTERMException):
        end_in_failure(error)
    watch = getattr(strategy, "watch", None)
    if watch is None:
        return None
    last = getattr(watch, "last_batch", None) if isinstance(error, SIGTERMException) else None
    asked_by = None if last is None else last.asked_by
    if asked_by is None:
        is_known = watch.failure is not None  # and where
        return watch.report(error, "" if is_known else where_of(trainer, error))
    told = watch.report(error, headline=f"rank {asked_by} was told to end (SIGTERM), and all ranks with it")
    if watch.rank in (0, asked_by):
        _log.warning(notes_of(told)[-1] if notes_of(told) else str(told))
    return told


def end_in_failure(error: SIGTERMException) -> None:
    """Have a process that was told to end do so with the exit code that says so; Lightning's exception has none."""
    if not error.code:
        error.args, error.code = (_TOLD_TO_END,), _TOLD_TO_END


def report_exception(strategy: Any, error: BaseException) -> None:
    """What a strategy does in `on_exception`; also in a parent of forked ranks, where the module has no Trainer."""
    tell(strategy, trainer_of(strategy), error)


def trainer_of(strategy: Any) -> Trainer | None:
    """The Trainer of a strategy's module; None in a process that started the ranks and is none, and before `fit`."""
    trainer: Trainer | None = getattr(getattr(strategy, "_lightning_module", None), "_trainer", None)
    return trainer


def show_notes(error: BaseException) -> None:
    """On Python 3.10, whose tracebacks leave them out, log an exception's notes."""
    if sys.version_info < (3, 11) and notes_of(error):
        _log.error("\n".join(notes_of(error)))


def where_of(trainer: Trainer | None, error: BaseException) -> str:
    """Which part of the user's code a Trainer run was in when it raised.

    Example: ``"on_train_epoch_start (epoch 0)"``, ``"the data loader (epoch 0, batch 3)"``.
    """
    if trainer is None:
        return ""
    files = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)]
    module = getattr(trainer.strategy, "_lightning_module", None)
    hook = getattr(module, "_current_fx_name", None)
    if any("/torch/utils/data/" in file for file in files) or type(error).__module__.startswith("torch.utils.data"):
        hook = "the data loader"
    where = f"{hook or getattr(trainer.state.fn, 'value', 'the run')}{_when(trainer, hook or '')}"
    return where + (_CUT_SHORT if _misses_what_steps_left(trainer.strategy, hook or "", error) else "")


def _misses_what_steps_left(strategy: Any, hook: str, error: BaseException) -> bool:
    """Whether a hook after steps failed on a stage where steps are cut short, maybe for want of what they append."""
    after_steps = hook.endswith(("_batch_end", "_epoch_end", "_validation_end", "_train_end", "_test_end"))
    has_stages = hasattr(type(strategy), "at_loss") and strategy._mesh is not None
    if not after_steps or not has_stages or isinstance(error, PhantomError):
        return False
    return not strategy.at_loss


def _when(trainer: Trainer, hook: str) -> str:
    if not hook or not trainer.training or hook.startswith(_ONCE):
        return ""
    if "epoch" in hook:
        return f" (epoch {trainer.current_epoch})"
    return f" (epoch {trainer.current_epoch}, batch {trainer.fit_loop.epoch_loop.batch_idx})"


def exit_hint(code: int | None) -> str | None:
    """What an exit code says about the end of a process.

    Example:
        >>> exit_hint(-9), exit_hint(-11), exit_hint(3)
        ('SIGKILL: the out-of-memory killer?', 'SIGSEGV', 'exit code 3')
    """
    if code is None:
        return None
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}: the out-of-memory killer?" if name == "SIGKILL" else name
