"""Selectors and a number format, one after the other, with one memory of all that they left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parameter_server.filters.codec import decode, encode
from lightning_parallel.parameter_server.filters.precision import Float32, Precision
from lightning_parallel.parameter_server.filters.selectors import Selector
from lightning_parallel.parameter_server.messages import Coded


class Filters:
    """What a worker's pushes go through.

    For every range, what servers have decoded so far plus ``residual`` is what was pushed so far: error feedback for
    elements that were skipped and for rounding alike.

    Args:
        selectors: rules that narrow down the elements, in order; each sees what the ones before chose.
        precision: number format of what is left.
        feedback: keep what was not sent for the next push; without it, it is lost.
        seed: of the rules that draw.

    Example:
        >>> from lightning_parallel.parameter_server.filters import Float16, TopK
        >>> filters = Filters([TopK(0.5)], Float16())
        >>> decode(filters.encode(0, torch.tensor([1.0, 4.0]))).tolist(), filters.residual[0].tolist()
        ([0.0, 4.0], [1.0, 0.0])
        >>> decode(filters.encode(0, torch.tensor([2.0, 0.5]))).tolist()
        [3.0, 0.0]

    Source:
        Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014 (error feedback).
    """

    def __init__(
        self,
        selectors: Sequence[Selector] = (),
        precision: Precision | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        self.selectors, self.precision, self.feedback = tuple(selectors), precision or Float32(), feedback
        self.residual: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def encode(self, key: int, push: Tensor) -> Coded:
        """What is sent of a push to a range."""
        wanted = push + self.residual[key] if key in self.residual else push
        coded = encode(wanted, self.precision, self._places(wanted))
        if self.feedback:
            self.residual[key] = wanted - decode(coded)
        return coded

    def _places(self, values: Tensor) -> Tensor | None:
        if not self.selectors:
            return None
        mask = torch.ones(values.numel(), dtype=torch.bool)
        for selector in self.selectors:
            mask &= selector.choose(values * mask, self._generator)
        return mask.nonzero().flatten()

    def state_dict(self) -> dict[str, Any]:
        """What was left behind, by range, and what the rules that draw go on from; for a checkpoint of the worker."""
        residual = {key: residual.clone() for key, residual in self.residual.items()}
        return {"residual": residual, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was left behind."""
        self.residual = {key: residual.clone() for key, residual in state["residual"].items()}
        self._generator.set_state(state["generator"])
