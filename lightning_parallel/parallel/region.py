"""Between a column-wise product and the row-wise one behind it, where each rank computes with features of its own.

The one idea: it begins where a column-wise module is called and ends where a row-wise one is, or with the module that
holds them. Inside, random numbers are the rank's own (dropout of attention weights must differ between heads); outside,
all ranks draw the same, as if nothing had been drawn inside. And what goes into several column-wise modules (query, key
and value) is copied to the ranks once, so that its gradient is summed once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.operators import copy_to_ranks
from lightning_parallel.parallel.overlap import Coming, OverlappedProduct
from lightning_parallel.pipeline.stage.random_streams import mix


class Region:
    """The regions of one model on one rank.

    Args:
        axis: the ranks.
        device: whose generator is kept in step beside the host's.
        overlap: whether gradients of weights are made while those of inputs are summed, see `overlap`.

    Attributes:
        summed: gives what the latest row-wise module returned, while it is there.
    """

    def __init__(self, axis: TensorAxis, device: torch.device, overlap: bool = False) -> None:
        self.axis, self.overlap = axis, overlap
        self.summed: Callable[[], Tensor | None] = lambda: None
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._copies: list[dict[int, tuple[Tensor, int, Tensor]]] = []  # of each open scope: inputs and their copies
        self._states: list[list[Tensor] | None] = []  # of each open scope: the generators outside the region

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    def open(self) -> None:
        """A module that holds column-wise ones is called."""
        self._copies.append({})
        self._states.append(None)

    def close(self) -> None:
        """It returns, or fails."""
        self.leave()
        self._copies.pop()
        self._states.pop()

    def enter(self, x: Tensor, number: int, training: bool) -> Tensor:
        """The input of column-wise module `number`, copied to the ranks; the region begins."""
        self.draw_own(number, training)
        return self.copied(x)

    def copied(self, x: Tensor) -> Tensor:
        """`x` copied to the ranks, once in a scope."""
        if not self._copies:
            return copy_to_ranks(x, self.axis)
        copies = self._copies[-1]
        known = copies.get(id(x))
        if known is None or known[1] != x._version:
            known = copies[id(x)] = (x, x._version, copy_to_ranks(x, self.axis))
        return known[2]

    def product(self, module: Any, x: Tensor) -> Tensor:
        """A column-wise module's output; `x` is copied to the ranks, once in a scope, and its gradient's sum overlaps
        with the weight's."""
        product = OverlappedProduct(module)
        known = self._copies[-1].get(id(x)) if self._copies else None
        if known is None or known[1] != x._version:
            coming = Coming(self.axis)
            behind = coming.behind(x)
            product.register()
            known = (x, x._version, coming.in_front(behind))
            if self._copies:
                self._copies[-1][id(x)] = known
        return product(known[2])

    def draw_own(self, number: int, training: bool) -> None:
        """From here on this rank draws its own numbers."""
        if training and self._states and self._states[-1] is None:
            states = [generator.get_state() for generator in self._generators]
            self._states[-1] = states
            seed = mix(zlib.crc32(states[0].numpy().tobytes()), number, self.axis.rank)
            for generator in self._generators:
                generator.manual_seed(seed)

    def leave(self) -> None:
        """From here on all ranks draw the same again."""
        if self._states and (states := self._states[-1]) is not None:
            self._states[-1] = None
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
