"""L-BFGS whose vectors never leave the servers: a coordinator sends dot, scale, axpy and copy, and gets numbers back.

The one idea: each range keeps named vectors beside its weights (``x``, ``g``, and the last m differences of both), and
a call is an entry of the range's history like any update: replicated, logged, done once. The coordinator adds the
ranges' dot products and decides; a call's number makes it idempotent. Gradients come from workers that take portions
of the batch (``parameter_server/manager/portions.py``) and push them into a sum, each portion once. Left out:
stochastic batches.

Source:
    Dean et al., NIPS 2012, section 4.2; Nocedal and Wright, Numerical Optimization, 2nd ed., algorithms 7.4, 7.5
    (L-BFGS) and 3.5, 3.6 (line search for the strong Wolfe conditions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Words = tuple[str | float, ...]


def perform(vectors: dict[str, Tensor], words: Words, values: Tensor | None = None) -> float:
    """Do one call on a range's vectors; float64, so that sums over ranges agree with one process.

    Calls: ``("dot", a, b)``, ``("scale", a, number)``, ``("axpy", number, a, b)`` is ``b += number * a``,
    ``("clamp", a, number)`` limits magnitudes, ``("copy", a, b)`` is ``b = a``, ``("max", a)`` is the largest
    magnitude, ``("norm1", a)`` their sum, ``("zero", a, like)``, ``("add", a)`` adds the values that came with the
    call, ``("drop", a)`` forgets a vector, ``("store",)`` makes ``x`` the range's weights.

    Raises:
        ValueError: there is no such call, or no such vector.

    Example:
        >>> vectors = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
        >>> perform(vectors, ("axpy", 2.0, "a", "b")), perform(vectors, ("dot", "a", "b"))
        (0.0, 6.0)
    """
    check(vectors, words, values)
    name, *rest = words
    if name == "dot":
        return float(vectors[str(rest[0])] @ vectors[str(rest[1])])
    if name == "max":
        return float(vectors[str(rest[0])].abs().max())
    if name == "norm1":
        return float(vectors[str(rest[0])].abs().sum())
    if name == "add" and values is not None:
        vectors[str(rest[0])].add_(values)
        return 0.0
    _CHANGES[str(name)](vectors, *rest)
    return 0.0


_SIGNATURES = {  # v: a vector that is there, n: a name, #: a number
    "dot": "vv", "scale": "v#", "clamp": "v#", "axpy": "#vv", "copy": "vn", "max": "v", "norm1": "v", "zero": "nv",
    "add": "v", "drop": "n", "store": "",
}  # fmt: skip


def check(vectors: Mapping[str, Tensor], words: Words, values: Tensor | None = None) -> None:
    """Refuse a call that cannot be done, so that it never gets into a range's history.

    Raises:
        ValueError: there is no such call, or no such vector, or the values are of another length.
    """
    name, *rest = words or ("",)
    signature = _SIGNATURES.get(str(name))
    if signature is None or len(signature) != len(rest):
        raise ValueError(f"No call {words!r}; calls are {', '.join(_SIGNATURES)}.")
    for kind, word in zip(signature, rest, strict=True):
        if kind == "v" and word not in vectors:
            raise ValueError(f"No vector {word!r} in {words!r}; vectors are {', '.join(sorted(vectors))}.")
        if isinstance(word, (int, float)) != (kind == "#"):
            raise ValueError(f"{word!r} is out of place in {words!r}.")
    if name == "add" and (
        values is None or values.shape != vectors[str(rest[0])].shape or not values.is_floating_point()
    ):
        what = "nothing" if values is None else f"{values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"{words!r} came with {what}, and needs floating-point numbers as long as the vector.")


def _scale(vectors: dict[str, Tensor], a: str, number: float) -> None:
    vectors[a].mul_(number)


def _clamp(vectors: dict[str, Tensor], a: str, number: float) -> None:
    vectors[a].clamp_(-number, number)


def _axpy(vectors: dict[str, Tensor], number: float, a: str, b: str) -> None:
    vectors[b].add_(vectors[a], alpha=number)


def _copy(vectors: dict[str, Tensor], a: str, b: str) -> None:
    vectors[b] = vectors[a].clone()


def _zero(vectors: dict[str, Tensor], a: str, like: str) -> None:
    vectors[a] = torch.zeros_like(vectors[like])


_CHANGES: dict[str, Callable[..., None]] = {
    "scale": _scale,
    "clamp": _clamp,
    "axpy": _axpy,
    "copy": _copy,
    "zero": _zero,
}
_CHANGES |= {"drop": lambda vectors, a: vectors.pop(a, None), "store": lambda vectors: None}


class VectorShards(Protocol):
    """What the coordinator talks to: every range does a call, and the results are added (of ``max``, the largest)."""

    def call(self, *words: str | float, vector: Tensor | None = None) -> float: ...


class LocalShards:
    """Ranges in this process.

    Args:
        parts: the first weights, one tensor a range.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.vectors = [{"x": part.to(torch.float64).clone()} for part in parts]

    def call(self, *words: str | float, vector: Tensor | None = None) -> float:
        lengths = [vectors["x"].numel() for vectors in self.vectors]
        parts = [None] * len(lengths) if vector is None else vector.split(lengths)
        results = [perform(vectors, words, part) for vectors, part in zip(self.vectors, parts, strict=True)]
        return max(results) if words[0] == "max" else sum(results)


Evaluate = Callable[[], float]


@dataclass
class LBFGS:
    """The coordinator.

    Args:
        shards: hold ``x``, and ``g`` after ``evaluate``.
        evaluate: makes the gradient at ``x`` lie in ``g`` on the shards and returns the loss.
        history: differences that are kept.
        tolerance: largest magnitude of the gradient at which it stops.
        max_steps: iterations at most.
    """

    shards: VectorShards
    evaluate: Evaluate
    history: int = 10
    tolerance: float = 1e-9
    max_steps: int = 200

    def run(self) -> float:
        """Minimize; the minimum lies in ``x`` on the shards, and its loss is returned."""
        call = self.shards.call
        loss, kept = self.evaluate(), list[int]()
        for step in range(self.max_steps):
            if call("max", "g") <= self.tolerance:
                break
            self._direction(kept)
            call("copy", "x", "x0")
            call("copy", "g", "g0")
            found = self._search(loss, first=not kept)
            if found is None:
                break  # no progress beyond rounding
            loss = found
            self._keep(step, kept)
        return loss

    def _direction(self, kept: list[int]) -> None:
        """The two loops: ``d`` becomes minus the approximate inverse Hessian times ``g``."""
        call = self.shards.call
        call("copy", "g", "d")
        alphas = {}
        for i in reversed(kept):
            alphas[i] = call("dot", f"s{i}", "d") / call("dot", f"s{i}", f"y{i}")
            call("axpy", -alphas[i], f"y{i}", "d")
        if kept:
            last = kept[-1]
            call("scale", "d", call("dot", f"s{last}", f"y{last}") / call("dot", f"y{last}", f"y{last}"))
        for i in kept:
            beta = call("dot", f"y{i}", "d") / call("dot", f"s{i}", f"y{i}")
            call("axpy", alphas[i] - beta, f"s{i}", "d")
        call("scale", "d", -1.0)

    def _keep(self, step: int, kept: list[int]) -> None:
        call = self.shards.call
        for vector, difference in (("x", "s"), ("g", "y")):
            call("copy", vector, f"{difference}{step}")
            call("axpy", -1.0, f"{vector}0", f"{difference}{step}")
        if call("dot", f"s{step}", f"y{step}") > 0:
            kept.append(step)
        if len(kept) > self.history:
            old = kept.pop(0)
            call("drop", f"s{old}")
            call("drop", f"y{old}")

    def _at(self, length: float) -> tuple[float, float]:
        """Loss and slope along ``d`` at a length from ``x0``."""
        self.shards.call("copy", "x0", "x")
        self.shards.call("axpy", length, "d", "x")
        loss = self.evaluate()
        return loss, self.shards.call("dot", "g", "d")

    def _search(self, start: float, first: bool) -> float | None:
        """A length that meets the strong Wolfe conditions; the loss there."""
        slope = self.shards.call("dot", "g", "d")
        length = min(1.0, 1.0 / (-slope) ** 0.5) if first else 1.0
        low, low_loss, low_slope, high = 0.0, start, slope, float("inf")
        for _ in range(40):
            loss, here = self._at(length)
            if loss > start + 1e-4 * length * slope or (low > 0 and loss >= low_loss):
                high = length
            elif abs(here) <= -0.9 * slope:
                return loss
            elif here >= 0:
                high, low, low_loss, low_slope = low, length, loss, here
            else:
                low, low_loss, low_slope = length, loss, here
            length = 2 * low if high == float("inf") else 0.5 * (low + high)
        del low_slope
        return None
