"""Where a rank's memory goes in a training step: the measurement, without a Trainer.

The one idea: one table of bytes a rank, by category, at three times: at the step's end, each category at its own peak,
and all of them at the moment when their sum was largest. Parameters, buffers and optimizer states are walked; gradients
and activations are followed through the step by a ``Ledger``; ``other`` is the batch and gathered parameters on a CPU,
and on a GPU whatever else the allocator says is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.measure.ledger import Ledger
from lightning_parallel.measure.storages import Key, count_bytes, tensors_in
from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.zero.optimizer.guarded_state import held_state

CATEGORIES = ("parameters", "buffers", "optimizer", "gradients", "activations", "other")
Bytes = Mapping[str, int]
Watch = Callable[[Callable[[int], None]], Callable[[], None]]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank in one training step, by category (see ``CATEGORIES``).

    Args:
        current: when the step had ended, gradients not yet zeroed.
        peak: the most of each category, each at its own moment.
        at_peak: of all categories at the one moment when their sum was largest.
        held: the most that forwards had saved for backwards to come, see ``Ledger.awaited``.
        saved: all that the forwards of the batch saved for backwards, each forward's added up.
    """

    current: Bytes
    peak: Bytes
    at_peak: Bytes
    held: int
    saved: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at a time."""
        return sum(self.at_peak.values())

    @property
    def current_bytes(self) -> int:
        """The bytes held when the step had ended."""
        return sum(self.current.values())


class Allocator(Protocol):
    """What a device says of its own memory."""

    def begin(self) -> None:
        """Forget the peak so far."""

    def read(self) -> tuple[int, int]:
        """Bytes in use now, and the most since ``begin``."""


class CudaAllocator:
    """PyTorch's allocator of one GPU; asking it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)


def allocator_of(device: torch.device) -> Allocator | None:
    """The allocator to ask, None where tensors have to be counted."""
    return CudaAllocator(device) if device.type == "cuda" else None


class MemoryMeter:
    """Measures one training step at a time: ``begin``, the step, ``end``.

    Args:
        module: what is trained. Parameters and buffers of other stages hold no memory and count 0.
        optimizers: whose states are counted.
        device: where the module is.
        allocator: asked for the totals; None leaves it at what is counted.
        activations: see ``Ledger``.
        gathered: gives what holds parameters for a while that are divided otherwise; it is no activation.
        watch_gathered: has a function called with the bytes that come (or go, below 0) in these, until what it returns
            is called. Asked where there is no allocator.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        allocator: Allocator | None = None,
        activations: bool = True,
        gathered: Callable[[], Iterable[Tensor]] = tuple,
        watch_gathered: Watch | None = None,
    ) -> None:
        self._gathered, self._watch_gathered = gathered, watch_gathered
        self._unwatch: Callable[[], None] | None = None
        self.module, self.optimizers, self.device = module, optimizers, device
        self.allocator, self.activations = allocator, activations
        self._ledger: Ledger | None = None
        self._before: dict[str, int] = {}

    def begin(self, batch: Any) -> None:
        """Start to measure a step on this batch."""
        self.close()
        seen, self._before = self._standing(batch)
        count_bytes(self._gathered(), self.device.type, seen)
        self._ledger = Ledger(self.module.parameters(), seen, self.device.type, self.activations)
        if self.allocator is not None:
            self.allocator.begin()
        elif self._watch_gathered is not None:
            self._unwatch = self._watch_gathered(self._ledger.note_gathered)
        self._ledger.__enter__()

    def end(self, batch: Any) -> RankMemory | None:
        """What the step took, or None if it was not measured."""
        ledger = self._ledger
        if ledger is None:
            return None
        ledger.note_gradients()  # those that were put in place of others
        after = self._standing(batch)[1]
        current = _with_gathered(after | ledger.live)
        at_peak = max(_with_gathered(self._before | ledger.at_peak), current, key=lambda table: sum(table.values()))
        peak = _with_gathered({kind: max(self._before[kind], after[kind]) for kind in after} | ledger.peak)
        self.close()
        if self.allocator is not None:
            current, peak, at_peak = self._with_the_rest(current, peak, at_peak, *self.allocator.read())
        return RankMemory(_in_order(current), _in_order(peak), _in_order(at_peak), *ledger.awaited())

    def note_gradients(self, held: Iterable[Tensor]) -> None:
        """Count gradients that lie elsewhere than at their parameters."""
        if self._ledger is not None:
            for gradient in held:
                self._ledger.note(gradient)

    def close(self) -> None:
        """Take the hooks away."""
        ledger, self._ledger = self._ledger, None
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if ledger is not None:
            ledger.__exit__(None, None, None)

    def _standing(self, batch: Any) -> tuple[set[Key], dict[str, int]]:
        """Bytes that do not change within a forward or a backward, and the storages they are in."""
        seen: set[Key] = set()
        # What states belong to are parameters, counted as such, or copies of them that only the optimizer has.
        held = [held_state(optimizer) for optimizer in self.optimizers]
        states = tensors_in([[*state, *state.values()] for state in held])
        trees = {
            "parameters": self.module.parameters(),
            "buffers": self.module.buffers(),
            "optimizer": states,
            "other": (leaf for leaf in microbatch.leaves(batch) if isinstance(leaf, Tensor)),
        }
        return seen, {kind: count_bytes(tensors, self.device.type, seen) for kind, tensors in trees.items()}

    @staticmethod
    def _with_the_rest(
        current: dict[str, int], peak: dict[str, int], at_peak: dict[str, int], in_use: int, most: int
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Make the totals those of the allocator; what was not counted is ``other``."""
        rest = [max(0, total - sum(t.values()) + t["other"]) for total, t in ((in_use, current), (most, at_peak))]
        other = {"other": rest[0]}, {"other": max(rest)}, {"other": rest[1]}
        return current | other[0], peak | other[1], at_peak | other[2]


def _with_gathered(table: Bytes) -> dict[str, int]:
    """What is gathered for a while is none of the states: it is among the rest, as where an allocator is asked."""
    return {**table, "other": table["other"] + table.get("gathered", 0)}


def _in_order(table: Bytes) -> dict[str, int]:
    return {kind: table[kind] for kind in CATEGORIES}
