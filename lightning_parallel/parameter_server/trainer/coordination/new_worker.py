"""What a worker that joins a running fit has to know to be where the others are.

The one idea: all are at one line of Lightning's loop, the start of an epoch, so that the counters of one worker's loops
are another's too. Weights and the optimizer's state are the servers'. Left out: who waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from torch import Tensor

from lightning_parallel.trainer.state.callback_states import load_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def state_of(trainer: Trainer, rest: Mapping[str, Tensor]) -> dict[str, Any]:
    """Counters, callbacks, learning rates and schedules, logged values, and what servers do not hold of the module."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in _groups(trainer)]
    return {
        "loops": trainer.fit_loop.state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "groups": groups,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": {name: value.cpu() for name, value in trainer.callback_metrics.items()},
        "module": {name: value.cpu() for name, value in rest.items()},
    }


def load_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Be where another worker is."""
    load_loops(trainer, state["loops"])
    load_callbacks(trainer, state["callbacks"])
    for group, values in zip(_groups(trainer), state["groups"], strict=True):
        group.update(values)
    for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    trainer._logger_connector._callback_metrics.update(state["metrics"])
    assert trainer.lightning_module is not None
    trainer.lightning_module.load_state_dict(state["module"], strict=False)


def load_loops(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Count as another worker does; nothing is resumed."""
    trainer.fit_loop.load_state_dict(dict(state))
    for loop in _all_loops(trainer.fit_loop):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _all_loops(loop: _Loop) -> Iterator[Any]:
    yield loop
    for child in vars(loop).values():
        if isinstance(child, _Loop):
            yield from _all_loops(child)
