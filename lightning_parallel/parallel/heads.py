"""How many attention heads a module has, and its attributes that say so, which are a rank's own once it is cut.

The one idea: unmodified code takes the number of its heads from an attribute, so the attribute is what changes. What
an attribute is called is convention; these are the names in use. Keys and values may have fewer heads than there are
ranks (grouped queries): then a rank has the one that its queries attend to, as other ranks have too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn

KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", *KEY_COUNTS)
GROUPS = ("num_key_value_groups", "n_rep")  # heads of queries for each of keys
WIDTHS = ("split_size", "all_head_size", "inner_dim", "attn_dim")  # features of all heads together
PER_HEAD = ("head_dim", "attention_head_size", "dim_per_head", "d_head", "head_size", "key_value_proj_dim")


def head_features(model: nn.Module, name: str) -> int:
    """Features of one head in the module that holds a linear one of that name, or around it; 0 if nothing says that."""
    for owner in _owners(model, name):
        for attribute in PER_HEAD:
            if _is_count(count := getattr(owner, attribute, None)):
                return count
    return 0


def says_heads(module: nn.Module) -> bool:
    """Whether a module tells its heads by one of the names in use."""
    return any(_is_count(getattr(module, attribute, None)) for attribute in (*COUNTS, *PER_HEAD))


def fused_heads(module: nn.Module) -> tuple[int, ...]:
    """Heads of query, key and value, where a module's attributes say that keys have fewer; () otherwise."""
    counts = [value for a in COUNTS if a not in KEY_COUNTS and _is_count(value := module.__dict__.get(a))]
    keys = [value for a in KEY_COUNTS if _is_count(value := module.__dict__.get(a))]
    if not counts or not keys or keys[0] >= counts[0]:
        return ()
    return counts[0], keys[0], keys[0]


def shared_heads(module: nn.Module, name: str, size: int) -> dict[str, int]:
    """A rank's own counts and widths of a module that has some, by attribute.

    Raises:
        ValueError: the ranks do not divide one.
    """
    if not says_heads(module):
        return {}
    found = {a: value for a in (*COUNTS, *WIDTHS) if _is_count(value := module.__dict__.get(a))}
    for attribute, value in found.items():
        if value % size and not (attribute in KEY_COUNTS and size % value == 0):
            raise ValueError(
                f"`{name}` has {attribute}={value}, which {size} ranks of the tensor axis do not divide. Choose a"
                " tensor_parallel_size that divides the heads, and of which keys' and values' heads are a divisor or"
                " a multiple."
            )
    return {attribute: max(1, value // size) for attribute, value in found.items()}


def groups_of(module: nn.Module, copies: int) -> dict[str, int]:
    """A rank's own count of query heads for each key head, by attribute, where so many ranks have each key head."""
    found = {a: value for a in GROUPS if _is_count(value := module.__dict__.get(a))}
    return {attribute: value // copies for attribute, value in found.items()}


def _owners(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The module that holds one of that name, and the one around it."""
    for _ in range(2):
        name = name.rpartition(".")[0]
        if name:
            yield model.get_submodule(name)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
