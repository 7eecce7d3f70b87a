"""The attributes of a module's own that say how wide it is.

The one idea: the forward of a class of somebody else reads them, so they have to say what this rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_parallel.parallel.auto import Style
from lightning_parallel.parallel.axis import TensorAxis
from lightning_parallel.parallel.experts import shared_width
from lightning_parallel.parallel.shares import ShardMap
from lightning_parallel.parallel.styles import is_conv1d


def own_widths(
    name: str, module: Any, style: Style, shares: Mapping[str, ShardMap], axis: TensorAxis
) -> dict[str, Any]:
    """What the attributes of a module that is to be cut are on this rank.

    Args:
        name, module, style: the module, its name and how it is cut.
        shares: of the parameters, by their names.
        axis: the ranks.
    """
    if style.kind in ("colwise", "keys", "fused", "head") and is_conv1d(module):
        return {"nf": shares[f"{name}.weight"].local_shape(axis.rank)[1]}
    if style.kind == "heads":
        return {"num_heads": module.num_heads // axis.size}
    if style.kind == "experts":
        return shared_width(module, axis.size)
    if style.kind == "vocab" and module.padding_idx is not None:
        begin, end = shares[f"{name}.weight"].span(axis.rank)
        return {"padding_idx": module.padding_idx - begin if begin <= module.padding_idx < end else None}
    return {}
