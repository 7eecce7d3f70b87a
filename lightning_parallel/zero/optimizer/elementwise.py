"""Which optimizers may be divided: those that treat every element of a parameter by itself.

Those of PyTorch are known. Any other is tried on a small matrix for a few steps: whole, in two pieces, and in two
pieces each in an optimizer of its own, as the ranks have them. Pipelines, whose ranks hold whole parameters, try two of
them together and apart. What comes out has to be the same.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_parallel.zero.optimizer.guarded_state import own_methods, sharers

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
_STEPS, _CUT = 10, 10
_INSTEAD = {
    "pieces": (
        "each rank holds pieces of parameters. Use an optimizer that treats each element by itself (SGD, Adam, AdamW,"
        " RMSprop, ...)."
    ),
    "parameters": (
        "each rank holds the parameters of its own stage. Use an optimizer that treats each parameter by itself (SGD,"
        " Adam, AdamW, RMSprop, ...)."
    ),
}
_WHOLE = " HybridStrategy(zero_stage=0) with no other axis than data gives every rank all parameters, and runs it."


def refuse_optimizer(optimizer: Optimizer, who: str) -> None:
    """Raise for an optimizer whose step is not the same on pieces of parameters, each in an optimizer of its own.

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
        raise ValueError(f"{who} got {name}, but {reason}; {_INSTEAD['pieces']}{'' if name == 'LBFGS' else _WHOLE}")


def refuse_coupling(optimizer: Optimizer, who: str) -> None:
    """Raise for an optimizer whose step on one parameter depends on others, which other ranks hold.

    Args:
        optimizer: as the user made it.
        who: what refuses it, for the message.

    Raises:
        ValueError: it does not treat each parameter by itself.

    Example:
        >>> refuse_coupling(torch.optim.SGD([torch.zeros(2)], lr=0.1), "PipelineStrategy")
    """
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.") or name == "_MockOptimizer":
        return
    reason = _coupling(optimizer)
    if reason is not None:
        raise ValueError(f"{who} got {name}, but {reason}; {_INSTEAD['parameters']}{_WHOLE}")


def _difference(optimizer: Optimizer) -> str | None:
    """Why the elements of a parameter cannot be divided, None if they can."""
    if len(sharers(optimizer)) <= sum(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return "it holds another optimizer with states of its own"
    [values], gradients = _trial([(4, 6)])
    halves = [values.flatten()[:_CUT], values.flatten()[_CUT:]]
    parts = [[half for [g] in gradients for half in [g.flatten()[cut]]] for cut in (slice(_CUT), slice(_CUT, None))]
    try:
        whole = _moved(optimizer, [values], gradients)
        together = _moved(optimizer, halves, [list(pair) for pair in zip(*parts, strict=True)])
        apart = [_moved(optimizer, [h], [[g] for g in gs]) for h, gs in zip(halves, parts, strict=True)]
    except Exception as error:
        return f"a step of it on a piece of a matrix raised {type(error).__name__}: {error}"
    if not whole.any():
        return _STILL
    if not _same(whole, together):
        return "its step on a matrix is not that on pieces of the matrix"
    if not _same(whole, torch.cat(apart)):
        return _COUPLED
    return _BY_LOSS if _uses_loss(optimizer, values, gradients) else None


def _uses_loss(optimizer: Optimizer, values: Tensor, gradients: list[list[Tensor]]) -> bool:
    """Whether a step goes by what its closure returns."""
    try:
        first, second = (_moved(optimizer, [values], gradients, torch.tensor(loss)) for loss in (1.0, 3.0))
    except Exception:
        return False  # it takes none
    return not _same(first, second)


def _coupling(optimizer: Optimizer) -> str | None:
    """Why parameters cannot be in optimizers of their own, None if they can."""
    values, gradients = _trial([(4, 6), (3, 5)])
    try:
        together = _moved(optimizer, values, gradients)
        apart = [_moved(optimizer, [v], [[g[i]] for g in gradients]) for i, v in enumerate(values)]
    except Exception as error:
        return f"a step of it on two matrices raised {type(error).__name__}: {error}"
    if not together.any():
        return _STILL
    return None if _same(together, torch.cat(apart)) else _COUPLED


_COUPLED = "its step on one parameter depends on others (as a norm over all of them does)"
_BY_LOSS = "its step goes by the loss, of which each rank has that of its own rows"
_STILL = "its step on parameters of its own moves nothing (is its learning rate 0?), so it cannot be tried"


def _trial(shapes: list[tuple[int, int]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values, and gradients of a few steps."""
    generator = torch.Generator().manual_seed(0)
    draws = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(1 + _STEPS)]
    return draws[0], draws[1:]


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two movements are the same but for rounding."""
    return bool((first - second).abs().max() <= 1e-4 * first.abs().max())


def _moved(
    optimizer: Optimizer, values: list[Tensor], gradients: list[list[Tensor]], loss: Tensor | None = None
) -> Tensor:
    """By how much a few steps move parameters that an optimizer of that kind has, 1-D.

    In 64 bits, since the first steps of some (Prodigy) are of 1e-6; in 32 if the optimizer has no other. Some make
    their state where they are constructed.
    """
    errors: list[Exception] = []
    for dtype in (torch.float64, torch.float32):
        for make in (_like, _constructed):
            try:
                return _steps(optimizer, values, gradients, dtype, loss, make)
            except Exception as error:
                errors.append(error)
    raise errors[-2]


def _steps(
    optimizer: Optimizer, values: list[Tensor], gradients: list[list[Tensor]], dtype: torch.dtype, loss: Tensor | None,
    make: Callable[[Optimizer, list[nn.Parameter]], Any],
) -> Tensor:  # fmt: skip
    parameters = [nn.Parameter(value.to(dtype, copy=True)) for value in values]
    before = [parameter.detach().clone() for parameter in parameters]
    trial = make(optimizer, parameters)
    if callable(getattr(trial, "train", None)):  # schedule-free ones step in training mode
        type(trial).train(trial)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.to(dtype, copy=True)
        type(trial).step(trial, **({} if loss is None else {"closure": lambda: loss}))
    return torch.cat([(p.detach() - b).flatten().double() for p, b in zip(parameters, before, strict=True)])


def _like(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Any:
    """An optimizer of the same class and settings for other parameters; its learning rate is not zero."""
    made = copy.copy(optimizer)
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    made.__dict__ = {name: _own(value) for name, value in kept.items()}
    for name in ("step", *own_methods(optimizer)):
        made.__dict__.pop(name, None)  # a scheduler's
    made.state = defaultdict(dict)
    shares = sharers(optimizer)
    group = {name: _own(value) for name, value in optimizer.param_groups[0].items()}
    if "lr" in group and not float(group["lr"]):  # a warm-up begins
        rate = float(group.get("initial_lr", 0.0)) or 1e-2
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
    made.param_groups = [{**group, "params": parameters}]
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            inner = _like(value, parameters)
            setattr(made, attribute, inner)
            if any(value is other for other in shares):
                made.state = inner.state
            if value.param_groups is optimizer.param_groups:
                made.param_groups = inner.param_groups
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made


def _constructed(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Any:
    """Such an optimizer, made anew with its defaults."""
    known = signature(type(optimizer)).parameters  # `copy` has added a default that not all take
    return type(optimizer)(parameters, **{name: value for name, value in optimizer.defaults.items() if name in known})


def _own(value: Any) -> Any:
    """What a trial may change of an optimizer's attribute without changing the optimizer."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict, set, deque)) else value
