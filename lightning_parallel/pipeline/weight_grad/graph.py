"""A walk through the graph of a backward that sorts its leaves: those that come with I, and weights that can wait.

The one idea: a weight waits if every use of it can. The walk takes every edge but those that lead to a weight's
product; what it meets comes with I. A weight that it meets nonetheless has a use of another kind, and then all of it
comes with I, so that hooks on it see one gradient as they do in a whole backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from lightning_parallel.pipeline.weight_grad.products import KINDS, VIEWS, Edge, Product, product_of

LEAF = "AccumulateGrad"
# Their backwards call autograd themselves, and raise if the one around them has targets.
WHOLE = frozenset({"CheckpointFunctionBackward"})


@dataclass
class Plan:
    """What I computes and what waits.

    Attributes:
        products: what waits.
        leaves: nodes of the leaves whose gradients come with I.
        ends: other nodes at which I ends. They are to run though nothing is behind them: they take note of what comes.
        whole: whether this backward cannot be split.
    """

    products: list[Product] = field(default_factory=list)
    leaves: set[Node] = field(default_factory=set)
    ends: list[Node] = field(default_factory=list)
    whole: bool = False

    def targets(self) -> list[Tensor | GradientEdge]:
        """Where the engine has to get to in I."""
        leaves: list[Tensor | GradientEdge] = [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]
        return leaves + [GradientEdge(node, 0) for node in self.ends]


def plan(roots: Sequence[Tensor | GradientEdge]) -> Plan:
    """Sort what the backward from these roots leads to."""
    found = Plan()
    stack = [(root if isinstance(root, GradientEdge) else get_gradient_edge(root)).node for root in roots]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind == LEAF:
            found.leaves.add(node)
            continue
        edges: Sequence[Edge] = node.next_functions
        if kind in KINDS and (product := product_of(node, edges, _leaf_behind)) is not None:
            found.products.append(product)
            edges = [edge for edge in edges if edge is not product.edge]
        behind = [node for node, _ in edges if node is not None]
        if not behind:
            found.ends.append(node)
        found.whole |= kind in WHOLE
        stack += behind
    found.products = [product for product in found.products if product.leaf not in found.leaves]
    return found


def _leaf_behind(edge: Edge) -> Node | None:
    """The parameter's node that an edge leads to through views and casts alone. (Other leaves are inputs.)"""
    node: Any = edge[0]
    while (kind := type(node).__name__) in VIEWS:
        node = node.next_functions[0][0]
    return node if kind == LEAF and (type(node.variable) is Parameter or isinstance(node.variable, Parameter)) else None
