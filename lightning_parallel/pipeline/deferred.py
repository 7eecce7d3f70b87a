"""I of a stage, and what it leaves for W: products that autograd would have made, and graphs of blocks to replay.

The one idea: both kinds wait in one object that W runs. Whoever counts what autograd saves (a hook on saved tensors) is
told of what waits, too: it is kept in the same way, from the forward until W.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.graphs import SharedGraphs
from lightning_parallel.pipeline.weight_grad import Plan, backward_inputs, plan


class Deferred:
    """The weight gradients of one micro-batch on one stage, waiting.

    Args:
        roots: where the backward begins.
        graphs: those of the rank's blocks, if they have any.
    """

    def __init__(self, roots: Sequence[Any], graphs: SharedGraphs | None) -> None:
        self._graphs, self._roots, self._slots = graphs, roots, list[Any]()
        self._plan: Plan | None = plan(roots)
        self._noted = _note(p.factor for p in self._plan.products if isinstance(p.factor, Tensor))

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """I: all gradients but those that wait."""
        roots, self._roots = self._roots, ()
        prepared, self._plan = self._plan, None
        if self._graphs is None:
            self._weights = backward_inputs(roots, gradients, prepared)
        else:
            with self._graphs.leaving_weights() as self._slots:
                self._weights = backward_inputs(roots, gradients, prepared)
        self._noted += _note(self._weights.tensors())

    def run(self) -> None:
        """W: those that waited. They are added within the product's own kernel where that can be."""
        self._weights.run(fused=True)
        for slot in self._slots:
            slot.weights()
        self._noted = []


def _note(tensors: Iterable[Tensor]) -> list[Any]:
    """What the hooks on saved tensors make of these, to be held as long as they wait; nothing without such hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return [] if hooks is None else [hooks[0](tensor) for tensor in tensors]
