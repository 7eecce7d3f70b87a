"""Runs of a script that are over, for a worker that others started again meanwhile: it passes them over.

The one idea: such a worker runs the script from its first line, while the others are in a later run of it. Rank 0 keeps
what became of every run, and the hub of a later one, which is forked from it, gives it to whoever asks; so the
Trainer's call leaves behind what it left on rank 0, and returns what it returned there. Left out: predictions, which
are each worker's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_parallel.errors import StageError
from lightning_parallel.parameter_server.trainer.coordination.new_worker import load_loops
from lightning_parallel.trainer.launch.script_launcher import ScriptLauncher
from lightning_parallel.trainer.state.callback_states import load_callbacks, load_measured, measured_by

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class RunsLauncher(ScriptLauncher):
    """Lets a worker that others started again pass over the runs that it missed, where `restarts` are allowed.

    Args:
        strategy: its ``find_run`` opens the line to the hub of the run that begins, or gives what became of the run;
            its ``keep_run`` is given that on rank 0.
    """

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Call the function, as one run of the script."""
        if trainer is None or not self._strategy.restarts:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        past = self._strategy.find_run()
        if past is not None:
            with passed_over(trainer, pickle.loads(past)):
                return function(*args, **kwargs)
        returned = super().launch(function, *args, trainer=trainer, **kwargs)
        if self._strategy.global_rank == 0:
            self._strategy.keep_run(pickle.dumps(result_of(trainer, returned)))
        return returned


def result_of(trainer: Trainer, returned: Any) -> dict[str, Any]:
    """What became of a run: the module's state, the callbacks', counters, metrics, what the Trainer's call returned."""
    predicts = trainer.state.fn == TrainerFn.PREDICTING
    result = {
        "is_own": predicts and returned is not None,
        "returned": None if predicts else returned,
        "module": trainer.lightning_module.state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "measured": measured_by(trainer),
        "loops": trainer.fit_loop.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
    }
    found: dict[str, Any] = move_data_to_device(result, "cpu")
    return found


@contextmanager
def passed_over(trainer: Trainer, result: dict[str, Any]) -> Iterator[None]:
    """Have the Trainer's next call set up what it would, and leave behind what became of it on rank 0.

    Raises:
        StageError: it returns predictions, of which each worker has its own.
    """

    def run(model: LightningModule, **_: Any) -> Any:
        if result["is_own"]:
            raise StageError(
                f"Rank {trainer.global_rank} was started again after a trainer.predict(), whose predictions nobody"
                " else has. Use a prediction writer and return_predictions=False."
            )
        _set_up(trainer, model)
        model.load_state_dict(result["module"])
        load_callbacks(trainer, result["callbacks"])
        load_measured(trainer, result["measured"])
        load_loops(trainer, result["loops"])
        trainer._logger_connector._callback_metrics.update(result["metrics"])
        trainer._logger_connector._logged_metrics.update(result["logged"])
        call._call_teardown_hook(trainer)
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        return result["returned"]

    trainer._run = run  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del trainer._run


def _set_up(trainer: Trainer, model: LightningModule) -> None:
    """Bring model and callbacks to where a run would have begun."""
    trainer.strategy.connect(model)
    trainer._callback_connector._attach_model_callbacks()
    trainer._data_connector.prepare_data()
    call._call_setup_hook(trainer)
    call._call_configure_model(trainer)
