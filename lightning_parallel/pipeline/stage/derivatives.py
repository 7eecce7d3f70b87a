"""Derivatives that the user's step takes itself: forces, gradient penalties, physics-informed losses.

`torch.autograd.grad` walks the graph that this process has. If a part of the model ran elsewhere the walk ends there,
and what should be a derivative is None, or zero for who says `allow_unused`. So every such walk is looked at before it
begins, and refused if it would not see the whole model. Left out: derivatives inside a block, which holds all that they
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOOKED_AT = ((torch.autograd, "_engine_run_backward"), (forward_ad, "make_dual"))  # what `looked_at` replaces
Look = Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]
RUNS_IT = (
    'ZeROStrategy(stage=1) or stage=2 and HybridStrategy(zero_stage=3, gather="step") without a pipeline axis run such'
    " steps, since they hold the whole model in a step."
)


@contextmanager
def looked_at(look: Look) -> Iterator[None]:
    """Inside, `look` is called with outputs and inputs of every derivative before it is taken, and whether it adds to
    the gradients of parameters, as `loss.backward()` does; it may raise.

    Of forward-mode derivatives (`torch.func.jvp`) it is given the tensor that gets a tangent as an input.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> with looked_at(lambda outputs, inputs, adds: print(len(outputs), len(inputs), adds)):
        ...     torch.autograd.grad(2 * x, x)
        1 1 False
        (tensor([2.]),)
    """
    run, make_dual = torch.autograd._engine_run_backward, forward_ad.make_dual

    def run_looked_at(outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        look(outputs, inputs, bool(kw.get("accumulate_grad")) and not inputs)
        return run(outputs, gradients, keep, create, inputs, *args, **kw)

    def make_dual_looked_at(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        look((), (tensor,), False)
        return make_dual(tensor, *args, **kwargs)

    torch.autograd._engine_run_backward, forward_ad.make_dual = run_looked_at, make_dual_looked_at  # type: ignore
    try:
        yield
    finally:
        torch.autograd._engine_run_backward, forward_ad.make_dual = run, make_dual


def reaches(tensors: Iterable[Tensor], is_there: Callable[[Any], bool]) -> bool:
    """Whether the graph behind tensors has a node for which `is_there` says so.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> reaches([2 * x], lambda node: getattr(node, "variable", None) is x)
        True
    """
    found = [node_of(tensor) for tensor in tensors]
    seen: set[Any] = set()
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        if is_there(node):
            return True
        seen.add(node)
        found += [following for following, _ in node.next_functions]
    return False


def node_of(tensor: Tensor) -> Any:
    """The node of the graph that makes a tensor, or takes up its gradient; None where nothing is to be derived."""
    if not tensor.requires_grad or is_transformed():
        return None
    return tensor.grad_fn if tensor.grad_fn is not None else torch.autograd.graph.get_gradient_edge(tensor).node


def is_transformed() -> bool:
    """Whether a function of `torch.func` (grad, vjp, jvp, vmap) is at work, on tensors of its own.

    Example:
        >>> torch.func.vmap(lambda x: x + is_transformed())(torch.zeros(1))
        tensor([1.])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_derivative(func: Callable[..., Any]) -> bool:
    """Whether a function that PyTorch hands over to a subclass of Tensor walks the graph.

    Example:
        >>> is_derivative(torch.autograd.grad), is_derivative(torch.add)
        (True, False)
    """
    return func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
