"""Callbacks that go on where they are in another process of the run.

The one idea: this knows nothing of launchers, which import Lightning first thing in a spawned process, and are imported
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def load_callbacks(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Give callbacks the state that they have in another process of the run."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if state:
            if "dirpath" in state and hasattr(callback, "dirpath"):
                callback.dirpath = state["dirpath"]  # a ModelCheckpoint drops its scores if that differs
            callback.load_state_dict(state)
