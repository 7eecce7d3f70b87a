"""Optimizers whose states and methods are this library's for the time of a run, as Lightning's own code meets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch.optim import Optimizer

from lightning_parallel.zero.optimizer.guarded_state import exposed


def states_to_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move what this rank holds of optimizers' states."""
    for optimizer in optimizers:
        with exposed(optimizer):
            _optimizer_to_device(optimizer, device)


def share_methods(wrappers: Sequence[Any]) -> None:
    """Lightning's wrappers of optimizers find methods in the class; an engine has put others on the object."""
    for wrapper in wrappers:
        own = vars(wrapper.optimizer)
        methods = {name: value for name, value in own.items() if callable(value) and not name.startswith("_")}
        vars(wrapper).update({name: method for name, method in methods.items() if name != "step"})
