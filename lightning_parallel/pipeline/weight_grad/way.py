"""The way from a node of autograd's graph to the parameter that it used: through views and casts alone, or not at all.

The one idea: what is on such a way saves no tensors. Whether it runs with I, with W or with both, nothing is to be kept
for it, and where there is but a transposition nobody has to run it.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

Edge: TypeAlias = tuple[Node | None, int]

LEAF = "AccumulateGrad"
_TRANSPOSE, _TRANSPOSE_OF, _CAST, _VIEW, _NO_STEP = "t", "transpose", "cast", "view", "none"
_steps: dict[type, str] = {}  # of the types of nodes that were seen
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Split", "SplitWithSizes",
        "UnsafeSplit", "Slice", "Select", "Unbind", "Narrow", "Unsqueeze", "Squeeze", "Expand", "ToCopy", "Clone",
    )
    for number in (0, 1)
)  # fmt: skip


class Way:
    """A way to a parameter.

    Attributes:
        parameter: where it ends.
        start: the edge at which a gradient enters it, or the parameter where that is all.
        transposes: whether what enters is laid out as the transpose of what the parameter is.
        keeps_shape: whether there is no more than casts on it.
        bare: whether there is at most a transposition on it, and nobody holds the parameter's node, as those do who
            have hooks on it.
    """

    __slots__ = ("bare", "keeps_shape", "parameter", "start", "transposes")

    def __init__(self, parameter: Tensor, start: Edge | Tensor, transposes: bool, casts: bool, bare: bool) -> None:
        self.parameter, self.start, self.transposes, self.bare = parameter, start, transposes, bare
        self.keeps_shape = casts


def way_to_parameter(edge: Edge) -> Way | None:
    """The way that begins with an edge, if it leads to a parameter. (Other leaves are inputs.)"""
    node: Any = edge[0]
    kind = first = _steps.get(type(node)) or _step_of(type(node))
    casts, steps = True, 0
    while kind is not LEAF:
        if kind is _NO_STEP:
            return None
        casts = casts and kind is _CAST
        steps += 1
        node = node.next_functions[0][0]
        kind = _steps.get(type(node)) or _step_of(type(node))
    held = sys.getrefcount(node) > _UNHELD[steps > 0]
    parameter = node.variable
    if type(parameter) is not Parameter and not isinstance(parameter, Parameter):
        return None
    if not steps:
        return Way(parameter, parameter, False, True, not held)
    transposes = first is _TRANSPOSE
    return Way(parameter, edge, transposes or first is _TRANSPOSE_OF, casts, transposes and steps == 1 and not held)


def _step_of(kind: type) -> str:
    """What a node of this type is on a way: its end, a transposition, a cast, another view, or not on one."""
    name = kind.__name__
    special = {LEAF: LEAF, "TBackward0": _TRANSPOSE, "TransposeBackward0": _TRANSPOSE_OF, "ToCopyBackward0": _CAST}
    return _steps.setdefault(kind, special.get(name, _VIEW if name in _VIEWS else _NO_STEP))


def _references(edge: Edge) -> int:
    """How many references there are to the node at an edge's end, as `way_to_parameter` counts them."""
    node: Any = edge[0]
    if type(node).__name__ != LEAF:
        node = node.next_functions[0][0]
    return sys.getrefcount(node)


def _edge_of(weight: Tensor) -> Edge:
    return (weight @ weight).grad_fn.next_functions[0]  # type: ignore[union-attr]


with torch.enable_grad(), torch.inference_mode(False):
    _UNHELD = tuple(
        _references(_edge_of(w if i == 0 else w.t())) for i, w in enumerate([Parameter(torch.ones(1, 1))] * 2)
    )
