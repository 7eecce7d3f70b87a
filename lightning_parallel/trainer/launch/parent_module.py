"""A module that is built in `configure_model` was built in the ranks; the process that started them builds it, too,
when trained weights come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def build_where_weights_go(module: LightningModule, weights: Mapping[str, Any]) -> None:
    """Have a module its parameters, so that trained weights can be loaded into it.

    Args:
        module: in the process that started the ranks.
        weights: by name.
    """
    if not is_overridden("configure_model", module):
        return
    names = set(weights)
    error = ""
    if not names <= set(module.state_dict()):
        try:
            with torch.random.fork_rng():
                module.configure_model()
        except Exception as raised:
            error = f" (here configure_model raised {type(raised).__name__}: {raised})"
    missing = sorted(names - set(module.state_dict()))
    if missing:
        rank_zero_warn(
            f"The ranks have trained {len(names)} tensors, and {type(module).__name__} has no place for {len(missing)}"
            f" of them in this process, such as `{missing[0]}`{error}: they do not come back. Make"
            " configure_model build them without what setup() or other hooks leave, or load the file of a"
            " ModelCheckpoint."
        )
