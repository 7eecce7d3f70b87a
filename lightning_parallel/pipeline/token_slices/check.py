"""Does a block compute on slices what it computes on the whole? Tried once for every new signature.

The one idea: a block's code is the user's, and nobody can read off it that positions meet in causal attention alone.
So it is called with the whole sequence and with its slices, in float64, without gradients and with dropout off, and
what comes out is compared. A convolution or a norm along the sequence, BatchNorm, attention that looks ahead or is
written out by hand, positions counted within the block: all of these show, and are refused with the block's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage.cut import Hook
from lightning_parallel.pipeline.stage.random_streams import RandomStreams
from lightning_parallel.pipeline.stage.side_effects import is_hooked
from lightning_parallel.pipeline.stage.snapshot import untouched
from lightning_parallel.pipeline.token_slices.arguments import cut, is_cache, length_of, refuse_ahead
from lightning_parallel.pipeline.token_slices.attention import KeysAndValues, SlicedAttention, WholeSequence, forbids
from lightning_parallel.pipeline.token_slices.call import stream_of
from lightning_parallel.pipeline.token_slices.lengths import Slices

ROUNDING = 1e-5  # of the largest number that the whole block returns; what a block itself makes float32 rounds to 6e-8

_REMEDY = (
    "Token slices are for blocks whose positions meet in causal attention by scaled_dot_product_attention (for models"
    ' of transformers: attn_implementation="sdpa") or nn.MultiheadAttention alone. Use a schedule of whole'
    " micro-batches, such as 1f1b."
)


def check_block(
    hook: Hook, owner: nn.Module, module: Callable[..., Any], arguments: Any, slices: Slices, key: int,
    streams: RandomStreams, length: int = 0,
) -> int:  # fmt: skip
    """Compare a block's call with the whole sequence and in slices.

    Args:
        hook, owner, module: the block and its own `__call__`.
        arguments: (args, kwargs) of the call, real.
        slices, key, streams: how it is cut, and with which random numbers.
        length: T of the blocks before it, 0 for the first one.

    Returns:
        T.

    Raises:
        PhantomError: they differ.
        ValueError: the sequence cannot be cut so.
    """
    here = length_of(hook.name, arguments)
    if length not in (0, here):
        raise PhantomError(f"Block `{hook.name}` is called with {here} positions, the ones before it with {length}.")
    bounds = slices.bounds(here)
    for leaf in tree_flatten(arguments)[0]:
        if isinstance(leaf, Tensor):
            refuse_ahead(hook.name, leaf, here, forbids(hook))
    with torch.no_grad(), untouched(owner), in_double(owner):
        streams.start(key ^ hook.own_stream)
        with WholeSequence():
            whole = _call(module, arguments, 0, here, here, hook)
        pieces, before = [], list[KeysAndValues]()
        for number, (start, end) in enumerate(bounds):
            streams.start(stream_of(hook, key, number))
            with SlicedAttention(before, end, here, dropout=False, forbids=forbids(hook)) as attention:
                pieces.append(_call(module, arguments, start, end, here, hook))
            before.append(attention.own)
    _compare(hook.name, whole, pieces, here)
    return here


@contextmanager
def in_double(owner: nn.Module) -> Iterator[None]:
    """A block computes in float64: in 16 bits (or TF32) rounding would hide what slices lack. Buffers stay so."""
    data = {p: p.data for p in owner.parameters() if p.is_floating_point()}
    default = torch.get_default_dtype()
    for parameter in data:
        parameter.data = parameter.data.double()
    for module in owner.modules():
        module._buffers.update({name: _double(x) for name, x in module._buffers.items() if x is not None})
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)
        for parameter, before in data.items():
            parameter.data = before


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def refuse_hooks(hook: Hook, owner: nn.Module) -> None:
    """Raise if something watches what a block or a module in it returns: it would see slices.

    Raises:
        PhantomError: something does.
    """
    if is_hooked(owner) or any(hook.hooks_inside):
        raise PhantomError(
            f"A forward hook on `{hook.name}` or inside it would be called with slices of the sequence. Remove it, or"
            " use a schedule of whole micro-batches."
        )


def real_arguments(arguments: Any, real: Callable[[Tensor], Any]) -> Any:
    """(args, kwargs) of a slice, with caches for generation left out."""

    def of(leaf: Any) -> Any:
        return real(leaf) if isinstance(leaf, Tensor) else None if is_cache(leaf) else leaf

    return tree_map(of, arguments, is_leaf=is_cache)


def _call(module: Callable[..., Any], arguments: Any, start: int, end: int, length: int, hook: Hook) -> Any:
    args, kwargs = real_arguments(arguments, lambda x: _double(cut(x.detach(), start, end, length)).clone())
    try:
        return module(*args, **kwargs)
    except Exception as error:
        what = "on slices of a sequence"
        raise PhantomError(f"Block `{hook.name}` does not compute {what}: {error}. {_REMEDY}") from error


def _compare(name: str, whole: Any, pieces: list[Any], length: int) -> None:
    """Raise unless the tensors that slices gave, one behind the other, are those of the whole."""
    by_slice = zip(*([leaf for leaf in tree_flatten(p)[0] if isinstance(leaf, Tensor)] for p in pieces), strict=True)
    tensors = [leaf for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor)]
    for expected, parts in zip(tensors, by_slice, strict=True):
        if expected.dim() < 2 or expected.shape[1] != length:
            raise PhantomError(
                f"Block `{name}` returns a tensor of shape {tuple(expected.shape)}, which does not have the {length}"
                f" positions of the sequence in dim 1. {_REMEDY}"
            )
        found = torch.cat(parts, 1)
        if found.shape != expected.shape or _differ(found, expected):
            raise PhantomError(
                f"Block `{name}` does not compute on slices of a sequence what it computes on the whole. {_REMEDY}"
            )


def _differ(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return not torch.equal(found, expected)
    bound = ROUNDING * expected.abs().max().clamp(min=1e-6)
    return not bool(((found - expected).abs() <= bound).all())
