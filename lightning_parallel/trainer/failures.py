"""From an exception anywhere in a Trainer run to the failure that all ranks are told of.

The one idea: hooks, callbacks, loaders and `configure_optimizers` need no guard of their own, since whatever they raise
passes through the launcher, and Lightning still knows there which hook it was in.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import _TunerExitException

from lightning_parallel.errors import StageError
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


@contextmanager
def reported(strategy: Any, trainer: Trainer | None) -> Iterator[None]:
    """A context in which any exception is reported to all ranks and raised as a `StageError` whose cause it is.

    Before the strategy has a watch (a mistake in the Trainer's arguments) exceptions stay as they are.
    """
    try:
        yield
    except _TunerExitException:
        raise
    except BaseException as error:
        told = tell(strategy, trainer, error)
        if told is None or told is error or not isinstance(error, Exception):
            raise
        raise told from told.__cause__


def tell(strategy: Any, trainer: Trainer | None, error: BaseException) -> StageError | None:
    """Report an exception to all ranks; None where there is no watch to report to."""
    watch = getattr(strategy, "watch", None)
    return None if watch is None else watch.report(error, where_of(trainer, error))


def report_exception(strategy: Any, error: BaseException) -> None:
    """What a strategy does in `on_exception`; also in a parent of forked ranks, where the module has no Trainer."""
    tell(strategy, getattr(strategy._lightning_module, "_trainer", None), error)


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
