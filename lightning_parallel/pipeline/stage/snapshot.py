"""What a run of the user's step may change in the model besides gradients, kept to be put back.

The one idea: a step that is run to learn from it must leave no trace. Modes, buffers, and the model's own lists, dicts,
tensors and numbers are remembered and restored. Left out: what lies deeper in them, and objects of other classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.phantoms.phantom import Phantom

_INTERNAL = frozenset(vars(nn.Module()))


class Snapshot:
    """A model's modes, buffers and plain attributes as they are now.

    Args:
        model: the model; parameters are not copied.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> model.seen = [1]
        >>> snapshot = Snapshot(model)
        >>> _, _ = model(torch.ones(3, 2)), model.seen.append(2)
        >>> snapshot.restore()
        >>> model.seen, int(model.num_batches_tracked)
        ([1], 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self._modes = {module: module.training for module in model.modules()}
        self._held = {module: dict(module._buffers) for module in self._modes}
        self._buffers = {buffer: buffer.clone() for buffer in model.buffers() if not isinstance(buffer, Phantom)}
        self._plain = [(m, {k: _shallow(v) for k, v in vars(m).items() if k not in _INTERNAL}) for m in self._modes]

    def restore(self) -> None:
        """Put everything back; once."""
        for module, training in self._modes.items():
            module.training = training
        for module, named in self._held.items():
            module._buffers.update(named)
        with torch.no_grad():
            for buffer, value in self._buffers.items():
                buffer.copy_(value)
        for module, attributes in self._plain:
            module.__dict__.update(attributes)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What is done to a model inside, to anything but parameters and gradients, is undone."""
    snapshot = Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


def _shallow(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copy.copy(entry) if type(entry) in (list, dict, set) else entry for key, entry in value.items()}
    return copy.copy(value) if type(value) in (list, set) else value


__all__ = ["Snapshot", "untouched"]
