"""Parameters of other stages, and their gradients.

The one idea: optimizers, hooks and checkpoints see all parameters of the model by name and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.phantom import Phantom

_GET_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class ForeignParameter(Phantom):
    """A parameter of another stage: optimizers may group it by name and shape, computation may not use it.

    Attributes:
        has_gradient: whether its stage made a gradient by now. `grad` is then a Phantom too, so that a loop over all
            gradients (a norm, a clipping of one's own) raises where it would leave other stages out in silence.
    """

    stands_for = "parameter"
    has_gradient = False

    def __new__(cls, like: Tensor, device: torch.device, name: str, stages: Sequence[int]) -> ForeignParameter:
        origin = f"parameter `{name}` of stage {', '.join(map(str, stages))}"
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        parameter: Any = Phantom.__new__(cls, meta, device, origin, requires_grad=like.requires_grad)
        parameter._is_param = True
        return parameter

    @classmethod
    def __torch_function__(cls, func: Callable, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_GRADIENT and isinstance(args[0], ForeignParameter) and args[0].has_gradient:
            return ForeignGradient(args[0].meta, args[0].device, f"the gradient of {args[0].origin}")
        if func == _SET_DATA and isinstance(args[0], ForeignParameter) and isinstance(args[1], Phantom):
            args[0].meta = args[1].meta  # `module.to` gave it another dtype
        if func == torch.equal:  # of parameters it is asked whether they are the same one
            return args[0] is args[1]
        return super().__torch_function__(func, types, args, kwargs)


class ForeignGradient(Phantom):
    """The gradient of a parameter of another stage."""

    stands_for = "gradient"
