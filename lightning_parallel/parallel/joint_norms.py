"""Norms over the features of all heads together (OLMo 2's of queries and keys), where a rank has those of some heads.

The one idea: they are found by what they normalise: as many features as a product beside them makes. What becomes of
them is `styles.JointNorm`. Left out: sums of squares alone, which would send less and be for one kind of norm.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_parallel.parallel.auto import Style
from lightning_parallel.parallel.heads import head_features
from lightning_parallel.parallel.styles import features_of

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


def _beside(name: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    """The column-wise products in the same module."""
    holder = name.rpartition(".")[0]
    return {n: s for n, s in styles.items() if s.kind in _COLUMNS and n.rpartition(".")[0] == holder}
