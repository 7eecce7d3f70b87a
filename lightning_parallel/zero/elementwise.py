"""Which optimizers may be divided: those that treat every element of a parameter by itself.

The one idea: those of PyTorch are known. Any other is tried on a small matrix, whole and in pieces, for a few steps:
what comes out has to be the same.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

KNOWN = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
_REASONS = {
    "LBFGS": "its step takes products over all parameters and decides by the loss how often to run the step",
    "Adafactor": "it keeps sums over the rows and columns of a matrix",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients, which are not reduced here",
}
_STEPS, _SHAPE, _CUT = 3, (4, 6), 10


def refuse_optimizer(optimizer: Optimizer, who: str) -> None:
    """Raise for an optimizer whose step is not the same on pieces of parameters.

    Args:
        optimizer: as the user made it.
        who: what refuses it, for the message.

    Raises:
        ValueError: it does not treat each element by itself.

    Example:
        >>> refuse_optimizer(torch.optim.SGD([torch.zeros(2)], lr=0.1), "ZeROStrategy")
    """
    name = type(optimizer).__name__
    if type(optimizer) in KNOWN:
        return
    if name == "_MockOptimizer":  # Lightning's
        raise ValueError(
            f"{who} divides the states of an optimizer, and configure_optimizers returned None. Return an optimizer, or"
            ' train without one under another strategy ("ddp").'
        )
    reason = _REASONS.get(name) if type(optimizer).__module__.startswith("torch.") else None
    reason = reason or _difference(optimizer)
    if reason is not None:
        raise ValueError(
            f"{who} got {name}, but {reason}; each rank holds pieces of parameters. Use an optimizer that treats each"
            " element by itself (SGD, Adam, AdamW, RMSprop, ...)."
        )


def _difference(optimizer: Optimizer) -> str | None:
    """Why an unknown optimizer cannot be divided, None if it can."""
    try:
        whole, pieces = (
            _after_steps(optimizer, [slice(None)]),
            _after_steps(optimizer, [slice(_CUT), slice(_CUT, None)]),
        )
    except Exception as error:
        return f"a step of it on a piece of a matrix raised {type(error).__name__}: {error}"
    if torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6):
        return None
    return "its step on a matrix is not that on pieces of the matrix"


def _after_steps(optimizer: Optimizer, cuts: list[slice]) -> Tensor:
    """A small matrix after a few steps of the optimizer on it, or on pieces of it flattened."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(_SHAPE, generator=generator) for _ in range(1 + _STEPS))
    if len(cuts) == 1:
        parameters, parts = [nn.Parameter(values)], [gradients]
    else:
        parameters = [nn.Parameter(values.flatten()[cut]) for cut in cuts]
        parts = [[gradient.flatten()[cut] for gradient in gradients] for cut in cuts]
    trial = _like(optimizer, parameters)
    for step in range(_STEPS):
        for parameter, gradient in zip(parameters, parts, strict=True):
            parameter.grad = gradient[step].clone()
        type(trial).step(trial)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _like(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Any:
    """An optimizer of the same class and settings for other parameters."""
    made = copy.copy(optimizer)
    made.__dict__ = {**optimizer.__dict__}
    made.__dict__.pop("step", None)  # a scheduler's
    made.state = defaultdict(dict)
    made.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made
