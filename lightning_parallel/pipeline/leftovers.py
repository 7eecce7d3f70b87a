"""What a module leaves behind besides its result: attributes it sets in its forward, and what hooks on it collect.

The one idea: the loss may read such things (an auxiliary loss on each block, hidden states, features of a hook). On
other stages they must not be missing or old, so they are Phantoms there: reading one raises, as for any value of
another stage. Left out: hooks on modules inside a unit, which see nothing on other stages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.phantom import PhantomError, describe, summon

Attributes = dict[tuple[str, str], Any]  # (submodule, attribute) -> tensor, or its TensorMeta


def tensor_attributes(module: nn.Module) -> Attributes:
    """Plain tensor attributes of a module and what it holds; no parameters, no buffers."""
    return {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, Tensor)
    }


def left_behind(module: nn.Module, before: Attributes) -> Attributes:
    """Descriptions of the tensor attributes that were set since `before` was taken."""
    now = tensor_attributes(module)
    return {where: describe(value) for where, value in now.items() if before.get(where) is not value}


def leave_phantoms(module: nn.Module, left: Attributes, device: torch.device, origin: str) -> None:
    """Set on another stage's module what its forward would have set."""
    for (name, key), meta in left.items():
        vars(module.get_submodule(name))[key] = summon(meta, device, f"`{key}` set beside {origin}")


def call_hooks(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
    """Call another stage's module's forward hooks with Phantoms, as its call would have; returns the result.

    Raises:
        PhantomError: something has replaced the module's forward to record what it returns.
    """
    if "forward" in vars(module):
        raise PhantomError(
            f"Something records what {type(module).__name__} returns by replacing its forward (as output_hidden_states"
            " and output_attentions of transformers do), and this module runs on another stage. Switch it off, or"
            " choose blocks= so that producer and reader share a stage."
        )
    for number, hook in list(module._forward_hooks.items()):
        with_kwargs = number in module._forward_hooks_with_kwargs
        new = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
        result = result if new is None else new
    return result
