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

from lightning_parallel.pipeline.weight_grad.saved import CannotRead, Factor, reader
from lightning_parallel.pipeline.weight_grad.way import Edge, Way, way_to_parameter

Formula: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (gradient that comes in, other factor) -> product


class Product:
    """The gradient of one use of a weight, waiting.

    Args:
        node: the node of the graph whose half it is.
        way: where it goes on from there.
        formula: makes it.
        factor: the other factor, or how to read it from within the backward.
    """

    __slots__ = ("factor", "formula", "gradients", "node", "way")

    def __init__(self, node: Node, way: Way, formula: Formula, factor: Factor) -> None:
        self.node: Node | None = node
        self.way, self.formula, self.factor = way, formula, factor
        self.gradients: list[Sequence[Tensor | None]] = []  # what the node was called with: once, or never

    def watch(self) -> RemovableHandle | None:
        """Keep what the backward to come hands to the node. A handle is to be removed after it."""
        node, self.node = self.node, None
        assert node is not None
        if isinstance(self.factor, Tensor):
            node.register_prehook(self.gradients.append)  # no Python runs
            return None
        return node.register_prehook(self._note)

    def _note(self, gradients: Sequence[Tensor | None]) -> None:
        if not isinstance(self.factor, Tensor):
            self.factor = self.factor()
        self.gradients.append(gradients)

    def reached(self) -> bool:
        """Whether a gradient came to the node."""
        return bool(self.gradients) and self.gradients[0][0] is not None

    def operands(self) -> tuple[Tensor, Tensor]:
        """The gradient that came in, and the other factor."""
        return self.gradients[0][0], self.factor  # type: ignore[return-value]


def product_of(kind: Kind, node: Node, edges: Sequence[Edge]) -> tuple[int, Product] | None:
    """The product of a weight in a node of this kind that can wait, if there is one, and the number of its edge."""
    for slot, make in kind:
        way = way_to_parameter(edges[slot])
        if way is not None:
            try:
                made = make(node, way)
            except CannotRead:
                return None
            return None if made is None else (slot, made)
    return None


Kind: TypeAlias = tuple[tuple[int, Callable[[Any, Way], Product | None]], ...]


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


def _matmul(factor: str, formula: Formula, scaled: bool = False) -> Callable[[Any, Way], Product | None]:
    """How to make the product of one side of a matrix product."""
    read, transposed = reader(factor), of_second_transposed if formula is of_second else formula
    strided = torch.strided

    def make(node: Any, way: Way) -> Product | None:
        if scaled and node._saved_alpha != 1:
            return None
        saved = read(node)
        if isinstance(saved, Tensor) and (saved.layout is not strided or saved.is_complex()):
            return None
        return Product(node, way, transposed if way.transposes else formula, saved)

    return make


_read_input, _read_indices = reader("input"), reader("indices")


def _convolution(node: Any, way: Way) -> Product | None:
    """The weight of a convolution. Its factor is the input; of the weight the shape is enough."""
    weight = way.parameter
    if not way.keeps_shape or weight.is_complex():
        return None
    settings = [
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]
    return Product(node, way, partial(_of_kernel, weight.detach(), settings), _read_input(node))


def _of_kernel(weight: Tensor, settings: Sequence[Any], gradient: Tensor, x: Tensor) -> Tensor:
    if weight.dtype != x.dtype:  # it was cast
        weight = torch.empty_like(weight, dtype=x.dtype)
    mask = [False, True, False]
    return torch.ops.aten.convolution_backward(gradient, x, weight, [0], *settings, mask)[1]


def _embedding(node: Any, way: Way) -> Product | None:
    if node._saved_sparse:
        return None
    settings = [
        getattr(node, f"_saved_{name}") for name in ("weight_sym_argsize_0", "padding_idx", "scale_grad_by_freq")
    ]
    return Product(node, way, partial(_of_table, settings), _read_indices(node))


def _of_table(settings: Sequence[Any], gradient: Tensor, indices: Tensor) -> Tensor:
    rows, padding, by_frequency = settings
    padding = padding - 2**64 if padding >= 2**63 else padding  # none is -1, shown without its sign
    return torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, by_frequency)


# For each kind of node its factors that may be a weight: (number of the edge, how to make the product).
KINDS: dict[str, Kind] = {
    "MmBackward0": ((1, _matmul("self", of_second)), (0, _matmul("mat2", _of_first))),
    "AddmmBackward0": ((2, _matmul("mat1", of_second, scaled=True)), (1, _matmul("mat2", _of_first, scaled=True))),
    "BmmBackward0": ((1, _matmul("self", _of_second_batched)), (0, _matmul("mat2", _of_first_batched))),
    "ConvolutionBackward0": ((1, _convolution),),
    "EmbeddingBackward0": ((0, _embedding),),
}
