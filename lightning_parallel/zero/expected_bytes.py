"""What the paper promises a rank of a run, in bytes, and what the run adds to it, item by item.

The one idea: a measured number equals formula plus items, to the byte. Items are padding (buckets are cut into equal
parts), an uneven cut (a rank may own an element more than another), step counters, and what does not train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.zero.accounting import StateBytes, bytes_by_kind, volume_of_step
from lightning_parallel.zero.optimizer.guarded_state import held_state


@dataclass(frozen=True)
class ExpectedBytes:
    """Bytes of one kind of state on one rank.

    Args:
        formula: what the paper's formula gives.
        items: bytes on top, by what they are.
    """

    formula: Fraction
    items: Mapping[str, Fraction] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Formula and items together, whole bytes."""
        total = self.formula + sum(self.items.values(), Fraction(0))
        assert total.denominator == 1, (self.formula, self.items)
        return int(total)


@dataclass(frozen=True)
class ModelStates:
    """The promise of a stage to one rank of a run.

    Args:
        stage: 0, 1, 2 or 3.
        ranks: N, 1 in stage 0.
        parameters: P, elements that train.
        of: bytes of an element by kind, without ZeRO.
        kinds: "parameters", "gradients", "optimizer".
        moved_bytes: of an element that is reduced or gathered.
        gathers: how often a backward's parameters are gathered, where it is not as often as the paper says.
    """

    stage: int
    ranks: int
    parameters: int
    of: StateBytes
    kinds: Mapping[str, ExpectedBytes]
    moved_bytes: int
    gathers: int | None = None

    def volume(self, backwards: int = 1) -> dict[str, int]:
        """Bytes that a step of so many micro-batches moves, by collective, without padding."""
        nbytes = self.parameters * self.moved_bytes
        times = volume_of_step(self.stage, backwards)
        if self.gathers is not None:
            times["all_gather"] = self.gathers * backwards
        return {kind: count * nbytes for kind, count in times.items()}


def promise(
    stage: int, ranks: int, parameters: int, of: StateBytes, moved_bytes: int, held: Mapping[str, int], copy_bytes: int,
    owned: int, counters: int, frozen: int,
) -> ModelStates:  # fmt: skip
    """The promise, and what this rank holds beside it.

    Args:
        stage, ranks, parameters, of, moved_bytes: see `ModelStates`.
        held: elements that lie in memory, padding included: of "parameters", "gradients", and of the "copy" that the
            optimizer updates.
        copy_bytes: bytes of an element of that copy; 0 where the optimizer updates the parameters themselves.
        owned: elements whose other optimizer states this rank keeps.
        counters: bytes of states that are not by element.
        frozen: bytes of parameters that do not train.
    """
    formulas = {kind: parameters * size for kind, size in bytes_by_kind(stage, ranks, of).items()}
    share = Fraction(parameters, ranks)
    padding = {
        "parameters": of.parameters * (held["parameters"] - (share if stage == 3 else parameters)),
        "gradients": of.gradients * (held["gradients"] - (share if stage >= 2 else parameters)),
        "optimizer": copy_bytes * (held["copy"] - share) if copy_bytes else Fraction(0),
    }
    more: dict[str, dict[str, Fraction]] = {"parameters": {"frozen": Fraction(frozen)}, "gradients": {}}
    more["optimizer"] = {"uneven": (of.optimizer - copy_bytes) * (owned - share), "counters": Fraction(counters)}
    kinds = {
        kind: ExpectedBytes(Fraction(formula), {"padding": Fraction(padding[kind]), **more[kind]})
        for kind, formula in formulas.items()
    }
    return ModelStates(stage, ranks, parameters, of, kinds, moved_bytes)


def undivided(optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> ModelStates:
    """The promise where nothing is divided: stage 0, after an optimizer's step.

    Args:
        optimizers: all of them.
        parameters: those of this rank, of one dtype.
    """
    held = list(parameters)
    trained = [parameter for parameter in held if parameter.requires_grad]
    count, size = sum(p.numel() for p in trained), trained[0].element_size() if trained else 0
    by_element, counters = state_sizes((p, state) for o in optimizers for p, state in held_state(o).items())
    return promise(
        0, 1, count, StateBytes(size, size, by_element), size,
        held={"parameters": count, "gradients": count, "copy": 0}, copy_bytes=0, owned=count, counters=counters,
        frozen=sum(p.nbytes for p in held if not p.requires_grad),
    )  # fmt: skip


def most_of_ranks(numbers: Sequence[int], group: Any) -> list[int]:
    """The largest of each number over the ranks: one that owns nothing does not know them. All ranks call it."""
    most = torch.tensor(numbers)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.tolist()


def state_sizes(states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> tuple[int, int]:
    """Of optimizer states, given with what they belong to: bytes by element, and bytes of all that is not.

    Example:
        >>> p = torch.zeros(3)
        >>> state_sizes([(p, {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)})])
        (8, 4)
    """
    by_element = counters = 0
    for updated, state in states:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        sizes = [v.element_size() for n, v in tensors.items() if n != "step" and v.shape == updated.shape]
        by_element = max(by_element, sum(sizes))
        counters += sum(v.nbytes for n, v in tensors.items() if n == "step" or v.shape != updated.shape)
    return by_element, counters
