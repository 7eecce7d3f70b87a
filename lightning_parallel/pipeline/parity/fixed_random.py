"""Random numbers held still, so that a step can be compared on a batch and on its parts.

The one idea: a batch and its micro-batches cannot draw the same numbers, since they draw other amounts. So every draw
of torch's gives one number, the same for all entries, and dropout keeps everything. Left out: numpy's and Python's
generators, and draws inside kernels of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.phantoms.phantom import Phantom

_Z, _U = 0.5, 0.45  # what stands for a normal and for a uniform draw


class FixedRandom(TorchFunctionMode):
    """Inside, torch's random functions give numbers that depend on no shape.

    Example:
        >>> with FixedRandom():
        ...     x, y = torch.randn(2), torch.randint(10, (1,))
        >>> x, y
        (tensor([0.5000, 0.5000]), tensor([5]))
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, args, kwargs or {})


def _draw(value: float) -> Callable[..., Any]:
    """A function that makes a tensor."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        return result if isinstance(result, Phantom) else result.fill_(value)

    return rule


def _fill(value: Callable[..., Any]) -> Callable[..., Any]:
    """A method that fills a tensor; `value`: by the method's arguments."""

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], Phantom):
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        with torch.no_grad():
            args[0].copy_(torch.as_tensor(value(*args[1:], **kwargs)))
        return args[0]

    return rule


def _randint(func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if isinstance(result, Phantom):
        return result
    numbers = [x for x in args if isinstance(x, int) and not isinstance(x, bool)]
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    return result.fill_((low + kwargs.get("high", numbers[-1] if numbers else 0)) // 2)


def _normal(func: Any, args: Any, kwargs: Any) -> Any:
    of = dict(zip(("mean", "std"), args, strict=False)) | {k: v for k, v in kwargs.items() if k in ("mean", "std")}
    mean, std = of.get("mean", 0.0), of.get("std", 1.0)
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        return mean + _Z * std
    result = func(*args, **kwargs)
    return result if isinstance(result, Phantom) else result.fill_(mean + _Z * std)


def _uniform(a: float = 0.0, b: float = 1.0, **names: float) -> float:
    a, b = names.get("from", a), names.get("to", b)
    return a + (b - a) * _U


def _bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    p = args[1] if len(args) > 1 else kwargs.get("p")
    source = args[0]
    if isinstance(p, (int, float)):
        return torch.full_like(source, float(p > _U))
    return (source > _U).to(source.dtype)


def _multinomial(func: Any, args: Any, kwargs: Any) -> Any:
    weights, count = args[0], args[1] if len(args) > 1 else kwargs["num_samples"]
    again = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    best = weights.topk(1 if again else count).indices
    return best.expand(*weights.shape[:-1], count).clone() if again else best


def _permutation(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs.pop("generator", None)
    return torch.arange(*args, **kwargs)


def _kept(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs["input"]


def _without_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    elif "dropout_p" in kwargs:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return func(*args, **kwargs)


def _gumbel_softmax(func: Any, args: Any, kwargs: Any) -> Any:
    names = dict(zip(("logits", "tau", "hard", "eps", "dim"), args, strict=False)) | kwargs
    dim = names.get("dim", -1)
    soft = ((names["logits"] + _Z) / names.get("tau", 1)).softmax(dim)
    if not names.get("hard", False):
        return soft
    return torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


_DROPOUTS = (
    "dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_",
)  # fmt: skip
_RULES: dict[Any, Callable[..., Any]] = {
    torch.randn: _draw(_Z), torch.randn_like: _draw(_Z), torch.rand: _draw(_U), torch.rand_like: _draw(_U),
    torch.randint: _randint, torch.randint_like: _randint, torch.normal: _normal, torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial, torch.randperm: _permutation, torch.poisson: lambda f, a, k: a[0].round(),
    Tensor.multinomial: _multinomial, Tensor.bernoulli: _bernoulli,
    Tensor.normal_: _fill(lambda mean=0.0, std=1.0: mean + _Z * std),
    Tensor.uniform_: _fill(_uniform),
    Tensor.bernoulli_: _fill(lambda p=0.5: p > _U),
    Tensor.exponential_: _fill(lambda lambd=1.0: _Z / lambd),
    Tensor.log_normal_: _fill(lambda mean=1.0, std=2.0: mean + _Z * std),
    Tensor.cauchy_: _fill(lambda median=0.0, sigma=1.0: median),
    Tensor.geometric_: _fill(lambda p: 1.0), Tensor.random_: _fill(lambda *bounds, **names: 1.0),
    F.scaled_dot_product_attention: _without_dropout, F.gumbel_softmax: _gumbel_softmax,
    **{getattr(torch, name): _kept for name in _DROPOUTS},
    **{getattr(F, name): _kept for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
                                            "feature_alpha_dropout")},
}  # fmt: skip
