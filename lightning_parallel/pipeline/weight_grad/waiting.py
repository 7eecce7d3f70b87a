"""W: products of weights that wait, and how they get into `p.grad`.

The one idea: a product enters autograd's engine where its node would have handed it on, many in one call, so that what
happens on the way to `p.grad` (casts, sums over uses, hooks) happens as in a whole backward, once a parameter. Several
micro-batches may run together: the products of a weight are then summed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

from lightning_parallel.pipeline.weight_grad.products import Product, of_second, of_second_transposed

IN_ONE_CALL = 2**27  # bytes of products that are made before the engine adds them to the gradients


class WeightGradients:
    """Products of weights that wait: W of one micro-batch.

    Args:
        products: those to which a gradient came.
    """

    def __init__(self, products: Sequence[Product] = ()) -> None:
        self._products = list(products)

    def __len__(self) -> int:
        return len(self._products)

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients lack something as long as this has not run; each once."""
        return list({product.leaf: product.leaf.variable for product in self._products}.values())  # type: ignore[attr-defined]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are kept until it runs: for each product the gradient that came in and the other factor."""
        for product in self._products:
            yield from product.operands()

    def run(self, ready: Callable[[Tensor], None] | None = None, fused: bool = False) -> None:
        """W: add the products to `p.grad` as autograd does, and forget them. A second call does nothing.

        Args:
            ready: called with each parameter once its products are in.
            fused: as for `run_together`.
        """
        run_together([self], ready, fused)

    def take(self) -> list[Product]:
        """The products; they are this object's no longer."""
        products, self._products = self._products, []
        return products


@torch.no_grad()
def run_together(
    waiting: Sequence[WeightGradients], ready: Callable[[Tensor], None] | None = None, fused: bool = False
) -> None:
    """W of several micro-batches at once; a parameter's hooks are called once for all of them.

    Args:
        waiting: what `backward_inputs` returned, in the order of the backwards.
        ready: called with each parameter once its products are in.
        fused: add a product to a gradient that is there already within the product's own kernel, where no hook wants
            to see it: one pass over the gradient instead of three, rounded once instead of twice.
    """
    by_leaf: dict[Node, list[Product]] = {}
    for weights in waiting:
        for product in weights.take():
            by_leaf.setdefault(product.leaf, []).append(product)
    batch = _Batch(ready)
    for leaf, products in by_leaf.items():
        parameter = leaf.variable  # type: ignore[attr-defined]
        fuse = fused and not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
        while products:
            product = products.pop(0)
            if not (fuse and _add_within(parameter.grad, product)):
                batch.add(product)
                if fuse and products:  # the others go on top
                    batch.flush()
        batch.end(parameter)
    batch.flush()


class _Batch:
    """Products on their way into the engine."""

    def __init__(self, ready: Callable[[Tensor], None] | None) -> None:
        self._ready, self._complete = ready, list[Tensor]()
        self._edges: list[GradientEdge] = []
        self._products: list[Tensor] = []
        self._bytes = 0

    def add(self, product: Product) -> None:
        made = product.formula(*product.operands())
        self._edges.append(GradientEdge(*product.edge))  # type: ignore[arg-type]
        self._products.append(made)
        self._bytes += made.nbytes

    def end(self, parameter: Tensor) -> None:
        """No more products for this parameter."""
        if self._ready is not None:
            self._complete.append(parameter)
        if self._bytes >= IN_ONE_CALL:
            self.flush()

    def flush(self) -> None:
        """Let the engine add what is there to the gradients."""
        edges, products, complete = self._edges, self._products, self._complete
        self._edges, self._products, self._complete, self._bytes = [], [], [], 0
        if edges:
            _accumulate(edges, products)
        if self._ready is not None:
            for parameter in complete:
                self._ready(parameter)


def _accumulate(edges: Sequence[GradientEdge], products: Sequence[Tensor]) -> None:
    """`torch.autograd.backward(edges, products)` without its checks of every root, which cost more than the rest."""
    Variable._execution_engine.run_backward(
        tuple(edges), tuple(products), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _add_within(gradient: Tensor | None, product: Product) -> bool:
    """Add a matrix product to the gradient that is there, in one kernel; False where that cannot be."""
    node = product.edge[0]
    if gradient is None or gradient.layout != torch.strided or node is None:
        return False
    incoming, factor = product.operands()
    if not gradient.dtype == incoming.dtype == factor.dtype:
        return False
    if product.formula is of_second_transposed and node.next_functions[0][0] is product.leaf:
        gradient.addmm_(incoming.t(), factor)
    elif product.formula is of_second and node is product.leaf:
        gradient.addmm_(factor.t(), incoming)
    else:
        return False
    return True
