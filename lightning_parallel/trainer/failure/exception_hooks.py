"""The hooks that hear of a failure: what they save is saved where it can be, and one that fails leaves nothing behind.

The one idea: between the exception and the end of a run Lightning calls `on_exception` of callbacks and the datamodule,
and `finalize` of loggers, without a net. For so long these methods, and `trainer.save_checkpoint`, are stood in for.
Left out: how the ranks come together once more (``strategies/saving.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_parallel.failure.aborts import is_communication_error

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_log = logging.getLogger(__name__)


class LastWords:
    """Stands in for the hooks of a Trainer whose run has failed, until `restore`.

    Args:
        trainer: whose run has failed.
        saving: a context in which the model's state may be gathered; gives the reason why it cannot, or "". None in a
            process that started the ranks, which have saved what can be, or said why not.
        failure: gives what the run failed of, once ranks do not answer any more.
    """

    def __init__(
        self,
        trainer: Trainer,
        saving: Callable[[Trainer], AbstractContextManager[str]] | None,
        failure: Callable[[], BaseException | None],
    ) -> None:
        self._trainer, self._saving, self._failure = trainer, saving, failure
        self._replaced: list[tuple[Any, str]] = []
        holders: Any = trainer  # of what connectors put there
        hooks = [(one, "on_exception") for one in (*holders.callbacks, holders.datamodule) if one is not None]
        for owner, name in [*hooks, *((logger, "finalize") for logger in trainer.loggers)]:
            if callable(getattr(owner, name, None)):
                self._replace(owner, name, self._guarded(getattr(owner, name)))
        self._replace(trainer, "save_checkpoint", self._save)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        if name not in vars(owner):  # what somebody else put there is left alone
            vars(owner)[name] = function
            self._replaced.append((owner, name))

    def restore(self) -> None:
        """Give all hooks back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except BaseException:  # Lightning tears nothing down then
                self.restore()
                try:
                    self._trainer._teardown()
                except Exception:
                    _log.exception("The run that has failed could not be torn down:")
                self._trainer.state.stage = None
                raise

        return call

    def _save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """In place of `trainer.save_checkpoint`: every rank calls it, or it says why nothing is saved."""
        if self._saving is None:
            return
        try:
            with self._saving(self._trainer) as why:
                if not why:
                    type(self._trainer).save_checkpoint(self._trainer, filepath, *args, **kwargs)
        except Exception as error:
            is_silence = isinstance(error, TimeoutError) or is_communication_error(error)
            if error is not self._failure() and not is_silence:
                raise
            why = "another rank, or a server, stopped answering meanwhile"
        if why:
            rank_zero_warn(
                f"{filepath} is not saved: {why}. The last checkpoint before the failure is what there is to go on"
                " from; ModelCheckpoint(every_n_train_steps=...) writes more of them."
            )


def warn_of_unsaved(trainer: Trainer, why: str) -> None:
    """At the start of a run, warn of callbacks that would save when it fails, where nothing can be saved then.

    Args:
        trainer: whose callbacks they are.
        why: nothing can be, with the strategy's name.
    """
    callbacks: list[Any] = cast(Any, trainer).callbacks
    names = ["OnExceptionCheckpoint" for one in callbacks if isinstance(one, OnExceptionCheckpoint)]
    models = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
    names += ["ModelCheckpoint(save_on_exception=True)" for one in models if getattr(one, "save_on_exception", False)]
    if names:
        rank_zero_warn(
            f"{' and '.join(dict.fromkeys(names))} will save nothing if this run fails: {why}. Use"
            " ModelCheckpoint(every_n_train_steps=...) beside it, and go on from its last file; or use"
            " ZeROStrategy(stage=1), under which the state behind the last whole step is saved."
        )
