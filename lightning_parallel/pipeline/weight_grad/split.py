"""I: a backward without the products of weights.

The one idea: autograd's engine computes of each node only what leads to its targets. With every leaf as a target but
the weights whose products wait, it leaves out just these; a hook on their nodes keeps the gradients that come in. Where
nothing can wait, or nothing may, it is the whole backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from lightning_parallel.pipeline.weight_grad.graph import SplitPlan, plan
from lightning_parallel.pipeline.weight_grad.waiting import WeightGradients


def backward_inputs(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], prepared: SplitPlan | None = None
) -> WeightGradients:
    """I: a backward without the products of weights, which wait in what is returned.

    It accumulates every other gradient, calls every hook and frees the graph as `torch.autograd.backward(roots,
    gradients)` does. Of what the forward saved, only the factors of waiting products stay.

    Args:
        roots: where the backward begins.
        gradients: of the roots, None for a number.
        prepared: `plan(roots)`, made at any time since the forward: most of the host's time that I takes beyond a whole
            backward is spent on it, and it does not wait for gradients.

    Raises:
        RuntimeError: what autograd raises.

    Example:
        >>> layer, x = torch.nn.Linear(2, 1), torch.ones(3, 2, requires_grad=True)
        >>> weights = backward_inputs([layer(x).sum()], [None])
        >>> x.grad is None, layer.bias.grad, layer.weight.grad
        (False, tensor([3.]), None)
        >>> weights.run()
        >>> layer.weight.grad
        tensor([[3., 3.]])

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2: B and W of a backward.
    """
    found = plan(roots) if prepared is None else prepared
    if found.whole or not found.products:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        return WeightGradients()
    handles = [handle for product in found.products if (handle := product.watch()) is not None]
    try:
        if all(map(_fits, roots, gradients)):
            _engine_run_backward(
                tuple(roots), tuple(gradients), False, False, tuple(found.targets),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
        else:  # it fills in gradients of numbers, and says what is wrong
            torch.autograd.backward(roots, gradients, inputs=found.targets)  # type: ignore[arg-type]
    finally:
        for handle in handles:
            handle.remove()
    return WeightGradients([product for product in found.products if product.reached()])


def _fits(root: Tensor | GradientEdge, gradient: Tensor | None) -> bool:
    """Whether `torch.autograd.backward` has nothing to say of a root: its checks of roots and targets cost much."""
    if type(gradient) is not Tensor or gradient.is_nested or type(root) not in (Tensor, GradientEdge):
        return False
    like: Any = root if isinstance(root, Tensor) else root.node._input_metadata[root.output_nr]
    return tuple(like.shape) == gradient.shape and like.dtype is gradient.dtype
