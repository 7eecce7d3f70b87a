"""I of a stage, and what it leaves for W: products that autograd would have made, and graphs of blocks to replay.

The one idea: both kinds wait in one object that W runs. Whoever counts what autograd saves (a hook on saved tensors) is
told of what waits, too: it is kept in the same way, from the forward until W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_parallel.pipeline.graphs import SharedGraphs
from lightning_parallel.pipeline.weight_grad import SplitPlan, backward_inputs, hook_on_saved_tensors, plan
from lightning_parallel.pipeline.weight_grad.saved import Factor


class Deferred:
    """The weight gradients of one micro-batch on one stage, waiting.

    Args:
        roots: where the backward begins.
        graphs: those of the rank's blocks, if they have any.
        is_lent: whether a tensor lies in memory that is gone by W, as that of divided parameters is.
    """

    def __init__(
        self, roots: Sequence[Any], graphs: SharedGraphs | None, is_lent: Callable[[Tensor], bool] | None = None
    ) -> None:
        self._graphs, self._roots, self._slots = graphs, roots, list[Any]()
        self._plan: SplitPlan | None = plan(roots)
        for product in self._plan.products if is_lent is not None else ():
            product.factor = _kept(product.factor, is_lent)
        self._noted: list[Any] = []  # what hooks on saved tensors made of what waits
        self._pack = hook_on_saved_tensors()
        if self._pack is not None:
            for product in self._plan.products:
                product.factor = self._note_factor(product.factor)

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """I: all gradients but those that wait."""
        roots, self._roots = self._roots, ()
        prepared, self._plan = self._plan, None
        if self._graphs is None:
            self._weights = backward_inputs(roots, gradients, prepared)
        else:
            with self._graphs.leaving_weights() as self._slots:
                self._weights = backward_inputs(roots, gradients, prepared)
        if self._pack is not None:
            self._noted += map(self._pack, self._weights.tensors())

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients lack something until W."""
        return [*self._weights.parameters(), *(p for slot in self._slots for p in slot.block.parameters)]

    def run(self, ready: Callable[[Any], None] | None = None) -> None:
        """W: those that waited. They are added within the product's own kernel where that can be.

        Args:
            ready: called with each parameter once nothing more of this W comes to it.
        """
        last = {} if ready is None else {p: slot for slot in self._slots for p in slot.block.parameters}
        self._weights.run(ready and (lambda parameter: None if parameter in last else ready(parameter)), fused=True)
        for slot in self._slots:
            slot.weights()
            if ready is not None:
                for parameter in (p for p in slot.block.parameters if last[p] is slot):
                    ready(parameter)
        self._noted = []

    def _note_factor(self, factor: Tensor | Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Read a factor within the backward, before the node lets go of it, and note it."""

        def read() -> Tensor:
            tensor = factor if isinstance(factor, Tensor) else factor()
            assert self._pack is not None
            self._noted.append(self._pack(tensor))
            return tensor

        return read


def _kept(factor: Factor, is_lent: Callable[[Tensor], bool] | None) -> Factor:
    """A factor that W can read: one that is lent (a weight that is made of two weights) is copied within the I."""
    assert is_lent is not None
    if isinstance(factor, Tensor):
        return factor.clone if is_lent(factor) else factor

    def read() -> Tensor:
        tensor = factor()
        return tensor.clone() if is_lent(tensor) else tensor

    return read
