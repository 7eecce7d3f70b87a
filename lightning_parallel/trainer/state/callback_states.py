"""Callbacks that go on where they are in another process of the run, and what monitors have measured there.

The one idea: this knows nothing of launchers, which import Lightning first thing in a spawned process, and are imported
with it. What monitors measure is no state of a run, and gets into no checkpoint; they name the attributes that hold it.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

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


def measured_by(trainer: Trainer) -> bytes:
    """What the callbacks have measured that have ``measured_attributes``; as bytes, which nobody looks into."""
    return pickle.dumps({key: {name: getattr(one, name) for name in names} for key, one, names in _monitors(trainer)})


def load_measured(trainer: Trainer, measured: bytes) -> None:
    """Give monitors what they have measured in another process of the run."""
    found = pickle.loads(measured)
    for key, monitor, _ in _monitors(trainer):
        for name, value in found.get(key, {}).items():
            setattr(monitor, name, value)


def _monitors(trainer: Trainer) -> Iterator[tuple[tuple[str, int], Callback, tuple[str, ...]]]:
    """Monitors and the names of what they measure, by class and which of it they are."""
    seen: dict[str, int] = defaultdict(int)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        names: tuple[str, ...] = getattr(callback, "measured_attributes", ())
        if names:
            kind = type(callback).__qualname__
            yield (kind, seen[kind]), callback, names
            seen[kind] += 1
