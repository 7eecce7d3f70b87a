"""What comes and goes in a training step: activations and gradients, live and at their peak, byte by byte.

The one idea: nobody has to be asked. What forwards keep for backwards passes through autograd's own hooks for saved
tensors: what is saved counts from then until its backward lets go of it. A gradient counts from the moment at which a
backward has made it until its memory is freed, be it set aside or not. Left out: temporaries within an operation, and
what a recomputation under activation checkpointing keeps for the length of one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from lightning_parallel.measure.storages import Key, key_of, storages_of
from lightning_parallel.pipeline.phantoms.phantom import Phantom

MOVING = ("gradients", "activations")  # and "gathered" where somebody tells of that


class Ledger:
    """Bytes of gradients and activations while it is entered as a context; hooks exist only then.

    Args:
        parameters: whose gradients are watched; those of other stages are passed over.
        elsewhere: storages that are no activations though autograd saves them: parameters, buffers, the batch.
        device_type: the kind of device whose memory is counted, such as "cpu".
        activations: whether to watch what autograd saves. ``torch.func.grad`` and its like do not run under its hooks.

    Attributes:
        live: bytes of each kind now; what is gathered somebody else has to tell.
        peak: the most bytes of each kind at any moment.
        at_peak: bytes of each kind at the moment when their sum was largest.
    """

    def __init__(
        self, parameters: Iterable[Tensor], elsewhere: set[Key], device_type: str, activations: bool = True
    ) -> None:
        self.live, self.peak, self.at_peak = (dict.fromkeys(MOVING, 0) for _ in range(3))
        self._parameters = [p for p in parameters if p.requires_grad and not isinstance(p, Phantom)]
        self._elsewhere, self._device_type = elsewhere, device_type
        self._kept: dict[Key, _KeptStorage] = {}
        self._unbound: list[weakref.ref[_Saved]] = []  # saved Phantoms, whose values come when a block is reached
        self._events: list[tuple[int, _KeptStorage]] = []  # +1 where a storage was first saved, -1 where it was let go
        self._gradients: dict[Key, weakref.ref[torch.UntypedStorage]] = {}
        self._hooks = saved_tensors_hooks(partial(_Saved, self), _restore) if activations else None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Ledger:
        self.note_gradients()
        self._handles = [p.register_post_accumulate_grad_hook(self._note_gradient) for p in self._parameters]
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._gradients = {}  # weak references that are gone call nobody

    def note_gathered(self, nbytes: int) -> None:
        """So many bytes of parameters that are divided otherwise were gathered, or freed where that is below 0."""
        self.live.setdefault("gathered", 0)
        self._add("gathered", nbytes)

    def note_gradients(self) -> None:
        """Count the gradients that are there and were not seen to be made."""
        for parameter in self._parameters:
            self._note_gradient(parameter)

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.note(parameter.grad)

    def note(self, gradient: Tensor) -> None:
        """Count a gradient, wherever it is held."""
        for storage in storages_of(gradient):
            key = key_of(storage)
            if key not in self._gradients and storage.device.type == self._device_type:
                freed = partial(self._free_gradient, key, storage.nbytes())
                self._gradients[key] = weakref.ref(storage, freed)
                self._add("gradients", storage.nbytes())

    def _free_gradient(self, key: Key, nbytes: int, _: Any) -> None:
        if self._gradients.pop(key, None) is not None:
            self.live["gradients"] -= nbytes

    def keep(self, saved: _Saved, tensor: Tensor) -> None:
        """Autograd saved this tensor."""
        if self._unbound:
            self._look_for_values()
        self._count(saved, tensor)

    def _count(self, saved: _Saved, tensor: Tensor) -> None:
        if isinstance(tensor, Phantom):
            if tensor.value is None:
                self._unbound.append(weakref.ref(saved))
                return
            tensor = tensor.value
        for storage in storages_of(tensor):
            if key_of(storage) not in self._elsewhere and storage.device.type == self._device_type:
                saved.keys.append(key_of(storage))
                self._keep(storage)

    def _look_for_values(self) -> None:
        """A saved Phantom that was bound since holds what came from the stage before: a checkpointed block's input."""
        waiting, self._unbound = self._unbound, []
        for reference in waiting:
            if (saved := reference()) is not None:
                self._count(saved, saved.tensor)

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key = key_of(storage)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _KeptStorage(storage.nbytes(), by_forward=not _in_backward())
            self._events.append((1, kept))
            self._add("activations", kept.nbytes)
        kept.uses += 1

    def let_go(self, key: Key) -> None:
        """One saved tensor fewer lies in this storage."""
        if self._unbound:
            self._look_for_values()
        kept = self._kept[key]
        kept.uses -= 1
        kept.for_backward |= _in_backward()
        if not kept.uses:
            del self._kept[key]
            self._events.append((-1, kept))
            self.live["activations"] -= kept.nbytes

    def awaited(self) -> tuple[int, int]:
        """Bytes that forwards saved and backwards let go of: the most at a time, and all together.

        Without what was thrown away before a backward came, as when a step is cut in the middle of an expression, and
        without what a recomputation saved. This is what a schedule speaks of.
        """
        now = most = total = 0
        for sign, kept in self._events:
            if kept.by_forward and kept.for_backward:
                now += sign * kept.nbytes
                most, total = max(most, now), total + (kept.nbytes if sign > 0 else 0)
        return most, total

    def _add(self, kind: str, nbytes: int) -> None:
        self.live[kind] += nbytes
        self.peak[kind] = max(self.peak.get(kind, 0), self.live[kind])
        if sum(self.live.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(self.live)


@dataclass
class _KeptStorage:
    """A storage that autograd keeps, who saved it, and whether a backward has used it."""

    nbytes: int
    by_forward: bool
    uses: int = 0
    for_backward: bool = False


class _Saved:
    """A tensor that autograd saved. Autograd drops it with the backward that used it; then it tells the ledger."""

    __slots__ = ("__weakref__", "keys", "ledger", "tensor", "version")

    def __init__(self, ledger: Ledger, tensor: Tensor) -> None:
        # Detached: an operation's output knows the node that saves it, and a graph that nobody runs would never end.
        self.tensor = tensor if isinstance(tensor, Phantom) else tensor.detach()
        self.version = None if isinstance(tensor, Phantom) or tensor.is_inference() else tensor._version
        self.ledger = ledger
        self.keys: list[Key] = []  # of the storages that count for it
        ledger.keep(self, self.tensor)

    def __del__(self) -> None:
        for key in self.keys:
            self.ledger.let_go(key)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _restore(saved: _Saved) -> Tensor:
    """Give a saved tensor back, checking what autograd checks of one that passed no hooks.

    Raises:
        RuntimeError: it was written to since.
    """
    if saved.version is not None and saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{saved.tensor.type()} {list(saved.tensor.shape)}] is at version {saved.tensor._version}; expected"
            f" version {saved.version} instead."
        )
    return saved.tensor
