"""A mixture's experts, kept as two parameters for all of them, each expert cut as a perceptron is.

The one idea: a rank has some inner features of every expert, so that all ranks send the same rows to the same experts,
and what each makes of them is a part of a sum. That sum is linear in the weights of the router, which may be applied to
the parts: their gradients are sums over the ranks too. A bias behind it is the first rank's alone. Experts that are
modules of their own (a list of perceptrons) are cut as any perceptron, and not here.

Left out: norms behind an expert, whole experts dealt to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_parallel.parallel.operators import sum_over_ranks
from lightning_parallel.parallel.styles import CutPart

_GATES, _DOWN = "gate_up_proj", "down_proj"
GATES_BIAS, DOWN_BIAS = f"{_GATES}_bias", f"{_DOWN}_bias"


@dataclass(frozen=True)
class ExpertLayout:
    """How a module keeps its experts.

    Attributes:
        inner: features I of each.
        transposed: `gate_up_proj` is [experts, features, 2 I] and `down_proj` [experts, I, features], as GPT-OSS has
            them, and not [experts, 2 I, features] and [experts, features, I], as Mixtral has.
        interleaved: gates and what they multiply take turns among the 2 I.
        biases: `gate_up_proj_bias` [experts, 2 I] and `down_proj_bias` [experts, features] are there.
    """

    inner: int
    transposed: bool
    interleaved: bool
    biases: bool


def layout_of(module: nn.Module) -> ExpertLayout | None:
    """How a module keeps experts, if it does and has no other parameters. Whether gates are interleaved is what it says
    itself (`is_concatenated`); where it does not, those with biases are."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    biases = set(shapes) == {_GATES, _DOWN, GATES_BIAS, DOWN_BIAS}
    if not (biases or set(shapes) == {_GATES, _DOWN}) or len(shapes[_DOWN]) != 3:
        return None
    count, first, second = shapes[_DOWN]
    for inner, features, transposed in ((second, first, False), (first, second, True)):
        gates = (count, features, 2 * inner) if transposed else (count, 2 * inner, features)
        of_biases = ((count, 2 * inner), (count, features)) if biases else (None, None)
        if (shapes[_GATES], shapes.get(GATES_BIAS), shapes.get(DOWN_BIAS)) == (gates, *of_biases):
            return ExpertLayout(inner, transposed, not getattr(module, "is_concatenated", not biases), biases)
    return None


def shared_width(module: nn.Module, size: int) -> dict[str, int]:
    """A rank's own count of its experts' inner features, by the attribute that says it, if one does."""
    layout = layout_of(module)
    assert layout is not None
    names = [n for n in ("intermediate_dim", "intermediate_size") if module.__dict__.get(n) == layout.inner]
    return dict.fromkeys(names, layout.inner // size)


class Experts:
    """Experts with this rank's inner features."""

    _tensor_part: CutPart

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As theirs; rows and weights of the router are copied to the ranks."""
        region = self._tensor_part.region

        def copied(x: Any) -> Any:
            return region.copied(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        args, kwargs = tree_map(copied, (args, kwargs))
        bias = self.__dict__.get("_parameters", {}).get(DOWN_BIAS)
        if bias is not None:  # the others' gradient is zero, and not none: it is summed
            self.__dict__[DOWN_BIAS] = bias * float(region.axis.rank == 0)
        try:
            return sum_over_ranks(super().forward(*args, **kwargs), region.axis)  # type: ignore[misc]
        finally:
            self.__dict__.pop(DOWN_BIAS, None)
