"""Which parameters a plan cuts, and how: each once, whatever modules and names it has.

The one idea: a style is a module's, a cut a parameter's. A parameter that two modules share (an embedding and its head)
has to be cut in one way by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_parallel.parallel.attention_extras import SINKS
from lightning_parallel.parallel.auto import Style
from lightning_parallel.parallel.experts import GATES_BIAS, layout_of
from lightning_parallel.parallel.shares import ShardMap
from lightning_parallel.parallel.styles import is_conv1d


@dataclass(frozen=True)
class ParameterCut:
    """How one parameter of a module is cut."""

    leaf: str
    shares: ShardMap


def cuts_of(module: Any, style: Style, size: int) -> list[ParameterCut]:
    """How the parameters of a module in that style are cut; those that are not named stay whole."""
    out_dim = 1 if is_conv1d(module) else 0
    if style.kind in ("colwise", "keys", "fused", "head"):
        weight = _shares(module.weight.shape, out_dim, style, size)
        return [
            ParameterCut("weight", weight),
            *([] if module.bias is None else [ParameterCut("bias", _shares(module.bias.shape, 0, style, size))]),
        ]
    if style.kind == "rowwise":
        return [ParameterCut("weight", _shares(module.weight.shape, 1 - out_dim, style, size))]
    if style.kind in ("vocab", "features"):
        return [ParameterCut("weight", _shares(module.weight.shape, int(style.kind == "features"), style, size))]
    if style.kind == "experts":
        return _cuts_of_experts(module, style, size)
    if style.kind == "sinks":
        return [ParameterCut(SINKS, _shares(module.sinks.shape, 0, style, size))]
    if style.kind == "heads":
        names = ["in_proj_weight", *(["in_proj_bias"] if module.in_proj_bias is not None else [])]
        return [ParameterCut(name, _shares(getattr(module, name).shape, 0, Style("heads", 3), size)) for name in names]
    return []


def _cuts_of_experts(module: Any, style: Style, size: int) -> list[ParameterCut]:
    layout = layout_of(module)
    assert layout is not None
    pairs = style if layout.interleaved else Style("experts", 2)
    gates_dim, down_dim = (2, 1) if layout.transposed else (1, 2)
    cuts = [
        ParameterCut("gate_up_proj", _shares(module.gate_up_proj.shape, gates_dim, pairs, size)),
        ParameterCut("down_proj", _shares(module.down_proj.shape, down_dim, style, size)),
    ]
    return (
        [*cuts, ParameterCut(GATES_BIAS, _shares(module.gate_up_proj_bias.shape, 1, pairs, size))]
        if layout.biases
        else cuts
    )


def find_shares(model: nn.Module, styles: Mapping[str, Style], size: int) -> dict[str, ShardMap]:
    """How every parameter that is cut lies over so many ranks, by each of its names.

    Raises:
        ValueError: modules that share a parameter do not cut it alike.
    """
    cut: dict[int, tuple[str, ShardMap]] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        for one in cuts_of(module, style, size):
            parameter, full = module._parameters[one.leaf], f"{name}.{one.leaf}"
            other, shares = cut.setdefault(id(parameter), (full, one.shares))
            if shares != one.shares:
                raise ValueError(f"tensor_plan cuts `{other}` and `{full}`, which are one parameter, in two ways.")
    _refuse_ties(model, styles, size, cut)
    named = model.named_parameters(remove_duplicate=False)
    return {name: cut[id(parameter)][1] for name, parameter in named if id(parameter) in cut}


def _refuse_ties(
    model: nn.Module, styles: Mapping[str, Style], size: int, cut: Mapping[int, tuple[str, ShardMap]]
) -> None:
    """A parameter that is cut in one module cannot be whole in another."""
    for name, module in model.named_modules():
        style = styles.get(name)
        own = {one.leaf for one in cuts_of(module, style, size)} if style else set()
        for leaf, parameter in module._parameters.items():
            # A parameter that another module registers as a bare one beside (BERT's head bias) is only named there.
            if id(parameter) in cut and leaf not in own and "forward" in vars(type(module)) and _is_leaf(module):
                raise ValueError(
                    f"tensor_plan cuts `{cut[id(parameter)][0]}`, which `{name}` has too. Cut both (an embedding"
                    ' and its head: "vocab"), or none.'
                )


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _shares(shape: Sequence[int], dim: int, style: Style, size: int) -> ShardMap:
    return ShardMap(tuple(shape), dim, style.lengths(shape[dim]), size)
