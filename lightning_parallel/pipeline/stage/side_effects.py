"""What a module leaves behind besides its result: attributes it sets in its forward, and what hooks on it collect.

The one idea: the loss may read such things (an auxiliary loss on each block, hidden states, a router's logits that a
hook collects). On other stages they must not be missing or old, so they are Phantoms there: reading one raises, as for
any value of another stage. Hooks inside a module are called there with Phantoms, as often as they were where it ran.
Left out: lists that no module of the block holds, and dictionaries, which are mostly caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_parallel.pipeline.partition.compiled import replaces_forward
from lightning_parallel.pipeline.partition.layout import Unit
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.phantom import PLAIN
from lightning_parallel.pipeline.transport.tensor_meta import describe, summon

Attributes = dict[tuple[str, str], Any]  # (submodule, attribute) -> tensors, or their TensorMeta
Inside = Sequence[tuple[str, nn.Module]]  # the modules inside a unit, by their names there
_OF_EVERY_MODULE = set(vars(nn.Module()))


def tensor_attributes(module: nn.Module) -> Attributes:
    """Plain attributes of a module and what it holds that are tensors, or lists of them; no parameters, no buffers."""
    return {
        (name, key): list(value) if isinstance(value, list) else value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_EVERY_MODULE and _is_tensors(value)
    }


def _is_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and all(isinstance(entry, Tensor) for entry in value)
    )


def left_behind(module: nn.Module, before: Attributes) -> Attributes:
    """Descriptions of the attributes that were set, and of the lists that were changed, since `before` was taken."""
    now = tensor_attributes(module)
    return {where: describe(value) for where, value in now.items() if not is_same(before.get(where), value)}


def is_same(old: Any, new: Any) -> bool:
    """Whether an attribute still holds the same tensors."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(lambda a, b: a is b, old, new))
    return old is new


def leave_phantoms(module: nn.Module, left: Attributes, device: torch.device, origin: str) -> None:
    """Set on another stage's module what its forward would have set."""
    for (name, key), meta in left.items():
        attributes, phantoms = vars(module.get_submodule(name)), summon(meta, device, f"`{key}` set beside {origin}")
        if isinstance(phantoms, list) and isinstance(attributes.get(key), list):
            attributes[key][:] = phantoms  # others may hold the same list
        else:
            attributes[key] = phantoms


def is_hooked(module: nn.Module) -> bool:
    """Whether something else than its caller sees what a module returns."""
    return bool(module._forward_hooks) or replaces_forward(module)


def call_hooks(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
    """Call another stage's module's hooks with Phantoms, as its call would have; returns the result.

    Raises:
        PhantomError: something has replaced the module's forward to record what it returns.
    """
    if replaces_forward(module):
        raise PhantomError(
            f"Something records what {type(module).__name__} returns by replacing its forward (as output_hidden_states"
            " and output_attentions of transformers do), and this module runs on another stage. Switch it off, or"
            " choose blocks= so that producer and reader share a stage."
        )
    if module._forward_hooks:
        args, kwargs = _call_pre_hooks(module, args, kwargs)
    for number, hook in list(module._forward_hooks.items()):
        with_kwargs = number in module._forward_hooks_with_kwargs
        new = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
        result = result if new is None else new
    return result


def _call_pre_hooks(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Those in front of forward hooks, as a profiler begins in the one what it ends in the other."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if type(hook).__module__.startswith("torch.nn.utils."):  # makes weights, which are not here
            continue
        with_kwargs = number in module._forward_pre_hooks_with_kwargs
        new = hook(module, args, kwargs) if with_kwargs else hook(module, args)
        if new is not None:
            args, kwargs = new if with_kwargs else (new if isinstance(new, tuple) else (new,), kwargs)
    return args, kwargs


@dataclass
class Shown:
    """What the hooks inside a unit were called with: the hooked modules, and their calls in order."""

    names: set[str]
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)  # module, (args, kwargs), result


@contextmanager
def hooks_inside(inside: Inside, is_running: Callable[[], bool] = lambda: True) -> Iterator[Shown]:
    """Note what forward hooks inside a unit are called with while it runs (and `is_running` says that it does)."""
    hooked = {name: part for name, part in inside if part._forward_hooks}
    shown = Shown(set(hooked))

    def note(name: str) -> Any:
        def take(_: Any, args: Any, kwargs: Any, result: Any) -> None:
            if is_running():
                shown.calls.append((name, _outline((args, kwargs)), _outline(result)))

        return take

    handles = [part.register_forward_hook(note(name), with_kwargs=True) for name, part in hooked.items()]
    try:
        yield shown
    finally:
        for handle in handles:
            handle.remove()


def _outline(tree: Any) -> Any:
    """A description that can be sent: objects that are neither tensors nor plain values become None."""
    return describe(tree_map(lambda leaf: leaf if type(leaf) in PLAIN or isinstance(leaf, Tensor) else None, tree))


def call_hooks_inside(inside: Inside, shown: Shown | None, device: torch.device, unit: Unit) -> None:
    """Call the forward hooks inside another stage's unit with Phantoms, as its run would have.

    Raises:
        PhantomError: a hook is new since that stage said what hooks are called with.
    """
    hooked = {name: part for name, part in inside if part._forward_hooks}
    new = sorted(set(hooked) - (shown.names if shown is not None else set()))
    if new:
        raise PhantomError(
            f"A forward hook on `{unit.name}.{new[0]}` of stage {unit.stage} was registered after that stage had said"
            " what its hooks see. Register hooks before the first step, or set dynamic_shapes=True."
        )
    for name, arguments, result in shown.calls if shown is not None else []:
        if name in hooked:
            origin = f"the output of `{unit.name}.{name}` (stage {unit.stage})"
            args, kwargs = summon(arguments, device, origin)
            call_hooks(hooked[name], args, kwargs, summon(result, device, origin))
