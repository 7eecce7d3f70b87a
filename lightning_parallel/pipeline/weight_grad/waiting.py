"""W: products of weights that wait, and how they get into `p.grad`.

The one idea: a product enters autograd's engine where its node would have handed it on, many in one call, so that what
happens on the way to `p.grad` (casts, sums over uses, hooks) happens as in a whole backward, once a parameter. Several
micro-batches may run together: the products of a weight are then summed on the way. Where nothing is on the way it is
not gone (see `by_hand`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from lightning_parallel.pipeline.weight_grad.by_hand import add_by_hand
from lightning_parallel.pipeline.weight_grad.products import Product

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
        return list({id(product.way.parameter): product.way.parameter for product in self._products}.values())

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
    of: dict[int, list[Product]] = {}
    for weights in waiting:
        for product in weights.take():
            of.setdefault(id(product.way.parameter), []).append(product)
    batch = _ProductBatch(ready)
    for products in of.values():
        by_hand = fused or len(products) == 1
        parameter = products[0].way.parameter
        while products:  # each lets go of its tensors when it is done
            product = products.pop(0)
            if not (by_hand and add_by_hand(product, fused)):
                batch.add(product)
        if batch.counts:
            batch.end(parameter)
    batch.flush()


class _ProductBatch:
    """Products on their way into the engine, and parameters that are complete when they are in."""

    def __init__(self, ready: Callable[[Tensor], None] | None) -> None:
        self._ready, self._complete = ready, list[Tensor]()
        self._starts: list[Tensor | GradientEdge] = []
        self._products: list[Tensor] = []
        self._bytes = 0

    @property
    def counts(self) -> bool:
        """Whether it has to be told when a parameter is complete."""
        return self._ready is not None or self._bytes >= IN_ONE_CALL

    def add(self, product: Product) -> None:
        made, start = product.formula(*product.operands()), product.way.start
        self._starts.append(start if isinstance(start, Tensor) else GradientEdge(*start))  # type: ignore[arg-type]
        self._products.append(made)
        self._bytes += made.nbytes

    def end(self, parameter: Tensor) -> None:
        """No more products for this parameter."""
        if self._ready is not None and not self._starts:
            self._ready(parameter)
        elif self._ready is not None:
            self._complete.append(parameter)
        if self._bytes >= IN_ONE_CALL:
            self.flush()

    def flush(self) -> None:
        """Let the engine add what is there to the gradients."""
        starts, products, complete = self._starts, self._products, self._complete
        self._starts, self._products, self._complete, self._bytes = [], [], [], 0
        if starts:
            _accumulate(starts, products)
        if self._ready is not None:
            for parameter in complete:
                self._ready(parameter)


def _accumulate(starts: Sequence[Tensor | GradientEdge], products: Sequence[Tensor]) -> None:
    """`torch.autograd.backward(starts, products)` without its checks of every root, which cost more than the rest."""
    Variable._execution_engine.run_backward(
        tuple(starts), tuple(products), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
