"""What lies beside the products of attention: norms over the features of all heads together (OLMo 2), sinks (GPT-OSS).

The one idea: both are found by the size that products beside them say: a norm of as many features as one makes, a
number for each head. What becomes of norms is `styles.JointNorm`; sinks are cut. Left out: sums of squares of norms
alone, which would send less and be for one kind of norm.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_parallel.parallel.auto import Style
from lightning_parallel.parallel.heads import head_features
from lightning_parallel.parallel.styles import features_of

SINKS = "sinks"
_COLUMNS = ("colwise", "keys")


def joint_norms(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Which of the norms that a plan knows normalise all heads together.

    Raises:
        ValueError: one normalises other features than a product beside it makes.
    """
    found: dict[str, Style] = {}
    for name, style in styles.items():
        weight, per_head = getattr(model.get_submodule(name), "weight", None), head_features(model, name)
        if style.kind != "summed" or weight is None or weight.shape[-1] == per_head:
            continue
        made = {features_of(model.get_submodule(n))[1]: s for n, s in _beside(name, styles).items()}
        if weight.shape[-1] in made:
            found[name] = Style("joint", copies=made[weight.shape[-1]].copies)
        elif per_head and weight.shape[-1] > per_head:
            raise ValueError(
                f"`{name}` ({type(model.get_submodule(name)).__name__}) normalises {weight.shape[-1]} features, more"
                f" than those of a head ({per_head}), and no product beside it that the tensor axis cuts makes as many"
                f" ({', '.join(map(str, made)) or 'there is none'}). Leave its attention out: name what else is to be"
                ' cut, tensor_plan={"model.layers.*.mlp.up_proj": "colwise", ...}.'
            )
    return found


def sinks(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """The modules whose own parameter `sinks` has a number for each head that a product beside it makes."""
    found: dict[str, Style] = {}
    for name, style in styles.items():
        holder = name.rpartition(".")[0]
        numbers, per_head = model.get_submodule(holder)._parameters.get(SINKS), head_features(model, name)
        if style.kind != "colwise" or numbers is None or not per_head or holder in styles:
            continue
        if numbers.numel() * per_head == features_of(model.get_submodule(name))[1]:
            found[holder] = Style("sinks")
    return found


def _beside(name: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    """The column-wise products in the same module."""
    holder = name.rpartition(".")[0]
    return {n: s for n, s in styles.items() if s.kind in _COLUMNS and n.rpartition(".")[0] == holder}
