"""A matrix product added to `p.grad` without autograd's engine, where nobody can tell the difference.

The one idea: of a linear layer nothing but a transposition lies between product and parameter, and most parameters have
no hooks. Then what the engine does is one assignment or one addition, and costs a third of the host's time by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel.pipeline.weight_grad.products import Product, of_second, of_second_transposed


def add_by_hand(product: Product, fused: bool) -> bool:
    """Add a product to its parameter's gradient; False, and nothing done, where the engine has to.

    Nobody can tell the difference where there are no hooks on the parameter itself (those on its node: see `Way.bare`)
    and nothing is cast. (Written out: it runs for every product, in every W.)

    Args:
        product: of one of its uses.
        fused: add to a gradient that is there within the product's kernel.
    """
    way, formula = product.way, product.formula
    parameter = way.parameter
    if not way.bare or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    incoming, factor = product.operands()
    dtype = parameter.dtype
    if type(incoming) is not Tensor or type(factor) is not Tensor:
        return False
    if incoming.dtype is not dtype or factor.dtype is not dtype:
        return False
    if formula is of_second_transposed:
        left, right = incoming.t(), factor
    elif formula is of_second:
        left, right = factor.t(), incoming
    else:
        return False
    return _add(parameter, left, right, fused)


def _add(parameter: Tensor, left: Tensor, right: Tensor, fused: bool) -> bool:
    """Add a matrix product to a gradient that is a plain matrix, or make one."""
    gradient = parameter.grad
    if gradient is None:
        if not parameter.is_contiguous():
            return False
        parameter.grad = left.mm(right)
    elif type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
        return False
    elif fused:
        gradient.addmm_(left, right)
    else:
        gradient.add_(left.mm(right))
    return True
