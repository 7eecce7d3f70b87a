"""How many rows a batch has, and which of its lists have one entry a row.

The one idea: a list is a column of a batch (its tensors have all rows) or has one entry a row: plain values, or entries
of one kind whose tensors do not all have as many rows as the batch (boxes of each image, tokens of each sentence).
Left out: a top-level list of tensors of one shape, which is taken for columns.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, type(None))


def count_rows(batch: Any) -> int:
    """The number of rows of a batch: the first dimension of its first tensor with a dimension, or, of a batch that is a
    list of samples or holds nothing but lists of one length, the length of these.

    Raises:
        ValueError: the batch has no such tensor.

    Example:
        >>> import torch
        >>> count_rows({"name": ["a", "b"], "x": torch.zeros(2, 3)})
        2
        >>> count_rows(([torch.zeros(3, 8), torch.zeros(3, 9)], [0, 1]))
        2
    """
    rows = _length_of_lists(batch) or _number_of_samples(batch)
    if rows:
        return rows
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    raise ValueError(
        f"The pipeline got a batch of type {type(batch).__name__} without a tensor that has a first dimension, and"
        " cannot count its rows. Give the batch at least one tensor with one entry a row, in a tuple, list, mapping or"
        " dataclass (other objects are not looked into), or use num_microbatches=1, which cuts nothing."
    )


def row_lists(batch: Any, rows: int) -> Callable[[Any], bool]:
    """Tells of what lies in a batch of `rows` rows whether it is a list with one entry a row.

    Tuples other than of strings and numbers have only where the batch has nothing but lists.

    Example:
        >>> import torch
        >>> is_row_list = row_lists((torch.zeros(2, 3), [torch.ones(5), torch.ones(7)]), 2)
        >>> is_row_list([torch.ones(5), torch.ones(7)]), is_row_list([torch.ones(2), torch.ones(2)])
        (True, False)
    """
    only_lists = bool(_length_of_lists(batch) or _number_of_samples(batch))

    def is_row_list(value: Any) -> bool:
        if not _is_list(value) or len(value) != rows:
            return False
        if is_plain_list(value) or only_lists:
            return True
        ragged = isinstance(value[0], Mapping) or set(_lengths(value)) != {rows}
        return isinstance(value, list) and _is_of_one_kind(value) and ragged

    return is_row_list


def is_plain_list(value: Any) -> bool:
    """Whether it is a list or tuple of strings and numbers."""
    return _is_list(value) and all(isinstance(x, _PLAIN) for x in value)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf of a batch, in order."""
    inner = None if is_plain_list(tree) else children(tree)
    if inner is None:
        yield tree
    else:
        for value in inner:
            yield from leaves(value)


def map_named(
    function: Callable[[Any, tuple[str, ...]], Any],
    tree: Any,
    is_leaf: Callable[[Any, tuple[str, ...]], bool] = lambda value, name: is_plain_list(value),
    name: tuple[str, ...] = (),
) -> Any:
    """Apply a function to every leaf of a batch and its name; mappings, sequences and dataclasses keep their type.

    Example:
        >>> map_named(lambda leaf, name: ".".join(name), {"x": 1, "pair": ({"y": 2}, 3)})
        {'x': 'x', 'pair': ({'y': 'pair.0.y'}, 'pair.1')}
    """
    go = lambda value, part: map_named(function, value, is_leaf, (*name, str(part)))  # noqa: E731
    if is_leaf(tree, name):
        return function(tree, name)
    if isinstance(tree, Mapping):
        new = {key: go(value, key) for key, value in tree.items()}
        if type(tree) is dict:
            return new
        clone: Any = copy.copy(tree)
        if hasattr(tree, "data") and isinstance(tree.data, dict):  # UserDict, and with it transformers' BatchEncoding
            clone.data = dict(tree.data)
        clone.update(new)
        return clone
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(go(value, part) for part, value in zip(tree._fields, tree, strict=True)))
    if isinstance(tree, (list, tuple)):
        return type(tree)(go(value, part) for part, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: go(getattr(tree, f.name), f.name) for f in dataclasses.fields(tree)}
        clone = copy.copy(tree)
        for part, value in fields.items():
            object.__setattr__(clone, part, value)
        return clone
    return function(tree, name)


def nodes(tree: Any) -> Iterator[Any]:
    """All structures and leaves of a batch."""
    yield tree
    for value in [] if is_plain_list(tree) else children(tree) or []:
        yield from nodes(value)


def children(tree: Any) -> list[Any] | None:
    """What a structure holds; None for a leaf."""
    named = named_children(tree)
    return None if named is None else [value for _, value in named]


def named_children(tree: Any) -> list[tuple[str, Any]] | None:
    """What a structure holds, by key, position or attribute; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), value) for key, value in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return [(str(number), value) for number, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def _length_of_lists(batch: Any) -> int:
    """The length of a batch's lists if it holds nothing else and one of them can only have one entry a row."""
    columns = children(batch) or []
    lists = [column for column in columns if _is_list(column) and column and _is_of_one_kind(column)]
    lengths = {len(column) for column in lists}
    if not columns or len(lists) < len(columns) or len(lengths) > 1:
        return 0
    return lengths.pop() if any(_is_of_samples(column) for column in lists) else 0


def _is_of_samples(entries: Any) -> bool:
    """Whether entries of one kind cannot be columns: mappings, numbers, or tensors of several lengths."""
    return isinstance(entries[0], Mapping) or len(set(_lengths(entries))) != 1 or _has_numbers(entries)


def _has_numbers(tree: Any) -> bool:
    return any(isinstance(leaf, (int, float)) for leaf in leaves(tree))


def _number_of_samples(batch: Any) -> int:
    """The length of a list of samples: structures of one kind that are no batches themselves."""
    if not _is_list(batch) or len(batch) < 2 or not _is_of_one_kind(batch) or children(batch[0]) is None:
        return 0
    return 0 if all(_is_batch(entry) for entry in batch) else len(batch)


def _is_batch(entry: Any) -> bool:
    """Whether a structure's tensors have one first dimension. One tensor and a number are a sample and its label."""
    lengths = _lengths(entry)
    vectors = [length for length in lengths if length >= 0]
    numbers = -1 in lengths or _has_numbers(entry)
    return len(set(vectors)) == 1 and (len(vectors) > 1 or not numbers)


def _lengths(tree: Any) -> list[int]:
    """First dimensions of the tensors in it; -1 for a tensor that has none."""
    return [leaf.size(0) if leaf.dim() else -1 for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _is_of_one_kind(values: Any) -> bool:
    return len({_kind(value) for value in values}) == 1


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    return (type(value), *value) if isinstance(value, Mapping) else type(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
