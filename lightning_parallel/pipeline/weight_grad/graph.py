"""A walk through the graph of a backward that sorts its leaves: those that come with I, and weights that can wait.

The one idea: a weight waits if every use of it can. The walk takes every edge but those that lead to a weight's
product; what it meets comes with I. A weight that it meets nonetheless has a use of another kind, and then all of it
comes with I, so that hooks on it see one gradient as they do in a whole backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_parallel.pipeline.weight_grad.products import KINDS, Kind, Product, product_of
from lightning_parallel.pipeline.weight_grad.way import LEAF

# Their backwards call autograd themselves, and raise if the one around them has targets.
WHOLE = frozenset({"CheckpointFunctionBackward"})


@dataclass
class SplitPlan:
    """What I computes and what waits.

    Attributes:
        products: what waits.
        targets: where the engine has to get to in I: leaves, and other nodes at which it ends. These are to run though
            nothing is behind them: they take note of what comes.
        whole: whether this backward cannot be split.
    """

    products: list[Product] = field(default_factory=list)
    targets: list[Tensor | GradientEdge] = field(default_factory=list)
    whole: bool = False


_PLAIN, _LEAF, _WHOLE = "plain", "leaf", "whole"
_kinds: dict[type, str | Kind] = {}  # of the types of nodes that were seen


def _kind_of(type_of_node: type) -> str | Kind:
    name = type_of_node.__name__
    kind: str | Kind = KINDS.get(name, _PLAIN)
    if name == LEAF or name in WHOLE:
        kind = _LEAF if name == LEAF else _WHOLE
    return _kinds.setdefault(type_of_node, kind)


def plan(roots: Sequence[Tensor | GradientEdge]) -> SplitPlan:
    """Sort what the backward from these roots leads to. (Written out: it runs over every node, in every backward.)"""
    products: list[Product] = []
    leaves: list[Tensor] = []
    ends: list[Node] = []
    whole, kinds = False, _kinds
    nodes = list({(r if isinstance(r, GradientEdge) else get_gradient_edge(r)).node: None for r in roots})
    seen = set(nodes)
    for node in nodes:  # grows as it goes
        kind = kinds.get(type(node)) or _kind_of(type(node))
        if kind is _LEAF:
            leaves.append(node.variable)  # type: ignore[attr-defined]
            continue
        edges = node.next_functions
        if kind is not _PLAIN:
            if kind is _WHOLE:
                whole = True
            elif (found := product_of(kind, node, edges)) is not None:  # type: ignore[arg-type]
                slot, product = found
                products.append(product)
                edges = edges[:slot] + edges[slot + 1 :]
        ends_here = True
        for behind, _ in edges:
            if behind is not None:
                ends_here = False
                if behind not in seen:
                    seen.add(behind)
                    nodes.append(behind)
        if ends_here:
            ends.append(node)
    met = set(map(id, leaves))
    products = [product for product in products if id(product.way.parameter) not in met]
    return SplitPlan(products, [*leaves, *(GradientEdge(node, 0) for node in ends)], whole)
