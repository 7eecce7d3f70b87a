"""A matrix product added to `p.grad` without autograd's engine, where nobody can tell the difference.

The one idea: of a linear layer nothing but a transposition lies between product and parameter, and most parameters have
no hooks. Then what the engine does is one assignment or one addition, and costs a third of the host's time by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.weight_grad.products import Product, of_second, of_second_transposed


def is_unwatched(parameter: Any) -> bool:
    """Whether no hooks are on a parameter itself. (Those on its node: see `Way.bare`.)"""
    return not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks


def add_by_hand(parameter: Tensor, product: Product, fused: bool) -> bool:
    """Add a product to its parameter's gradient; False, and nothing done, where the engine has to.

    Args:
        parameter: without hooks.
        product: of one of its uses.
        fused: add to a gradient that is there within the product's kernel.
    """
    factors = _factors(product)
    if factors is None or any(type(x) is not Tensor or x.dtype is not parameter.dtype for x in factors):
        return False
    gradient = parameter.grad
    if gradient is None:
        if not parameter.is_contiguous():
            return False
        parameter.grad = factors[0].mm(factors[1])
    elif type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
        return False
    elif fused:
        gradient.addmm_(*factors)
    else:
        gradient.add_(factors[0].mm(factors[1]))
    return True


def _factors(product: Product) -> tuple[Tensor, Tensor] | None:
    """Two matrices whose product is the gradient of the parameter itself."""
    if not product.way.bare:
        return None
    gradient, factor = product.operands()
    if product.formula is of_second_transposed:
        return gradient.t(), factor
    if product.formula is of_second:
        return factor.t(), gradient
    return None
