"""Which nodes of autograd's graph hold the product of a weight, and how it is made: as autograd's own formulas do.

The one idea: a node has one edge a factor. Where the edge of a factor leads to a parameter and passes nothing but views
and casts, that half of the node can wait, since all it needs is what the node saved and the gradient that comes in.
Left to I: gradients of biases and norms (sums that share a kernel or a reading with the rest of their node), of sparse
and complex factors, and of all that is not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_parallel.pipeline.weight_grad.saved import CannotRead, read

Edge: TypeAlias = tuple[Node | None, int]
Formula: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (gradient that comes in, other factor) -> product

# Nodes that save no tensors: whether they run with I, with W or with both, they need nothing kept.
VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Split", "SplitWithSizes",
        "UnsafeSplit", "Slice", "Select", "Unbind", "Narrow", "Unsqueeze", "Squeeze", "Expand", "ToCopy", "Clone",
    )
    for number in (0, 1)
)  # fmt: skip


class Product:
    """The gradient of one use of a weight, waiting.

    Args:
        node: the node of the graph whose half it is.
        edge: where it goes on from there, towards the parameter.
        leaf: the parameter's node, where it ends.
        formula: makes it.
        factor: the other factor, or how to read it from within the backward.
    """

    __slots__ = ("edge", "factor", "formula", "gradients", "leaf", "node")

    def __init__(
        self, node: Node, edge: Edge, leaf: Node, formula: Formula, factor: Tensor | Callable[[], Tensor]
    ) -> None:
        self.node: Node | None = node
        self.edge, self.leaf, self.formula, self.factor = edge, leaf, formula, factor
        self.gradients: list[Sequence[Tensor | None]] = []  # what the node was called with: once, or never

    def watch(self) -> RemovableHandle:
        """Keep what the backward to come hands to the node."""
        node, self.node = self.node, None
        assert node is not None
        return node.register_prehook(self.gradients.append if isinstance(self.factor, Tensor) else self._note)

    def _note(self, gradients: Sequence[Tensor | None]) -> None:
        if not isinstance(self.factor, Tensor):
            self.factor = self.factor()
        self.gradients.append(gradients)

    def reached(self) -> bool:
        """Whether a gradient came to the node."""
        return bool(self.gradients) and self.gradients[0][0] is not None

    def operands(self) -> tuple[Tensor, Tensor]:
        """The gradient that came in, and the other factor."""
        gradient = self.gradients[0][0]
        assert gradient is not None and isinstance(self.factor, Tensor)
        return gradient, self.factor


def product_of(node: Node, edges: Sequence[Edge], leaf_behind: Callable[[Edge], Node | None]) -> Product | None:
    """The product of a weight in this node, if there is one that can wait."""
    for slot, make in _TABLE[type(node).__name__]:
        edge = edges[slot]
        leaf = leaf_behind(edge)
        if leaf is not None:
            try:
                made = make(node, edge)
            except CannotRead:
                return None
            return None if made is None else Product(node, edge, leaf, *made)
    return None


_Made: TypeAlias = tuple[Formula, Tensor | Callable[[], Tensor]] | None


def of_second(gradient: Tensor, first: Tensor) -> Tensor:
    """d/dB of A B, in rows."""
    return first.t().mm(gradient)


def of_second_transposed(gradient: Tensor, first: Tensor) -> Tensor:
    """d/dB of A B where B is the transpose of what is in memory."""
    return gradient.t().mm(first).t()


def _of_first(gradient: Tensor, second: Tensor) -> Tensor:
    return gradient.mm(second.t())


def _of_second_batched(gradient: Tensor, first: Tensor) -> Tensor:
    return first.transpose(1, 2).bmm(gradient)


def _of_first_batched(gradient: Tensor, second: Tensor) -> Tensor:
    return gradient.bmm(second.transpose(1, 2))


def _matmul(factor: str, formula: Formula, node: Any, edge: Edge) -> _Made:
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    saved = read(node, factor)
    if isinstance(saved, Tensor) and (saved.layout != torch.strided or saved.is_complex()):
        return None
    transposed = formula is of_second and type(edge[0]).__name__ in ("TBackward0", "TransposeBackward0")
    return (of_second_transposed if transposed else formula), saved


def _convolution(node: Any, edge: Edge) -> _Made:
    """The weight of a convolution. Its factor is the input; of the weight the shape is enough."""
    behind: Any = edge[0]
    while type(behind).__name__ == "ToCopyBackward0":
        behind = behind.next_functions[0][0]
    weight = getattr(behind, "variable", None)
    if weight is None or weight.is_complex():
        return None
    settings = [
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]
    return partial(_of_kernel, weight.detach(), settings), read(node, "input")


def _of_kernel(weight: Tensor, settings: Sequence[Any], gradient: Tensor, x: Tensor) -> Tensor:
    if weight.dtype != x.dtype:  # it was cast
        weight = torch.empty_like(weight, dtype=x.dtype)
    mask = [False, True, False]
    return torch.ops.aten.convolution_backward(gradient, x, weight, [0], *settings, mask)[1]


def _embedding(node: Any, edge: Edge) -> _Made:
    if node._saved_sparse:
        return None
    settings = [
        getattr(node, f"_saved_{name}") for name in ("weight_sym_argsize_0", "padding_idx", "scale_grad_by_freq")
    ]
    return partial(_of_table, settings), read(node, "indices")


def _of_table(settings: Sequence[Any], gradient: Tensor, indices: Tensor) -> Tensor:
    rows, padding, by_frequency = settings
    padding = padding - 2**64 if padding >= 2**63 else padding  # none is -1, shown without its sign
    return torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, by_frequency)


# For each kind of node its factors that may be a weight: (number of the edge, how to make the product).
_TABLE: dict[str, tuple[tuple[int, Callable[[Any, Edge], _Made]], ...]] = {
    "MmBackward0": ((1, partial(_matmul, "self", of_second)), (0, partial(_matmul, "mat2", _of_first))),
    "AddmmBackward0": ((2, partial(_matmul, "mat1", of_second)), (1, partial(_matmul, "mat2", _of_first))),
    "BmmBackward0": (
        (1, partial(_matmul, "self", _of_second_batched)),
        (0, partial(_matmul, "mat2", _of_first_batched)),
    ),
    "ConvolutionBackward0": ((1, _convolution),),
    "EmbeddingBackward0": ((0, _embedding),),
}  # fmt: skip
KINDS = frozenset(_TABLE)
