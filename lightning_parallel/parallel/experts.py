"""A mixture's experts, kept as two parameters for all of them, each expert cut as a perceptron is.

The one idea: a rank has some inner features of every expert, so that all ranks send the same rows to the same experts,
and what each makes of them is a part of a sum. That sum is linear in the weights of the router, which may be applied to
the parts: their gradients are sums over the ranks too. Experts that are modules of their own (a list of perceptrons)
are cut as any perceptron, and not here.

Left out: biases, norms behind an expert, weights that are kept the other way round, whole experts dealt to ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_parallel.parallel.operators import sum_over_ranks
from lightning_parallel.parallel.styles import Part

_GATES, _DOWN = "gate_up_proj", "down_proj"


def inner_features(module: nn.Module) -> int:
    """I of experts with `gate_up_proj` [experts, 2 I, features] and `down_proj` [experts, features, I] and no other
    parameters; 0 for any other module."""
    parameters = dict(module.named_parameters())
    if set(parameters) != {_GATES, _DOWN} or any(p.dim() != 3 for p in parameters.values()):
        return 0
    count, features, inner = parameters[_DOWN].shape
    return inner if tuple(parameters[_GATES].shape) == (count, 2 * inner, features) else 0


def shared_width(module: nn.Module, inner: int, size: int) -> dict[str, int]:
    """A rank's own count of so many inner features, by the attribute that says it, if one does."""
    names = [name for name in ("intermediate_dim", "intermediate_size") if module.__dict__.get(name) == inner]
    return dict.fromkeys(names, inner // size)


class Experts:
    """Experts with this rank's inner features."""

    _tensor_part: Part

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As theirs; rows and weights of the router are copied to the ranks."""
        region = self._tensor_part.region

        def copied(x: Any) -> Any:
            return region.copied(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        args, kwargs = tree_map(copied, (args, kwargs))
        return sum_over_ranks(super().forward(*args, **kwargs), region.axis)  # type: ignore[misc]
