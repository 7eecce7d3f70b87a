"""Cut a batch into micro-batches, keeping the user's structure, and join what the micro-batches returned.

The one idea: a batch is a tree of mappings, sequences and tensors, and has `rows`. Whatever has one entry a row (a
tensor whose first dimension is `rows`, a list of `rows` strings or numbers) is cut; everything else is handed to every
micro-batch as it is. Left out: batches whose rows lie along another dimension than the first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, type(None))


def count_rows(batch: Any) -> int:
    """The number of rows of a batch: the first dimension of its first tensor with a dimension.

    Raises:
        ValueError: the batch has no such tensor.

    Example:
        >>> count_rows({"name": ["a", "b"], "x": torch.zeros(2, 3)})
        2
    """
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise ValueError(
        f"The pipeline got a batch of type {type(batch).__name__} without a tensor that has a first dimension, and"
        " cannot count its rows. Give the batch at least one tensor with one entry a row."
    )


def row_sizes(rows: int, num_microbatches: int) -> list[int]:
    """Rows of each micro-batch: as even as can be, larger ones first; fewer micro-batches than asked if rows are few.

    Example:
        >>> row_sizes(10, 4), row_sizes(2, 4)
        ([3, 3, 2, 2], [1, 1])
    """
    count = max(1, min(rows, num_microbatches))
    return [rows // count + (i < rows % count) for i in range(count)]


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch of sum(sizes) rows into len(sizes) batches of the same structure.

    Example:
        >>> split((torch.arange(3), "tag", ["a", "b", "c"]), [2, 1])
        [(tensor([0, 1]), 'tag', ['a', 'b']), (tensor([2]), 'tag', ['c'])]
    """
    if len(sizes) == 1:
        return [batch]
    _refuse_graph(batch)
    rows = sum(sizes)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def cut(span: slice, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[span] if leaf.dim() > 0 and leaf.shape[0] == rows else leaf
        if _is_row_list(leaf):
            return leaf[span] if len(leaf) == rows else leaf
        return leaf

    return [map_leaves(partial(cut, span), batch) for span in spans]


def _refuse_graph(batch: Any) -> None:
    """Raise for a graph, whose edges name nodes by their place among all nodes of the batch."""
    for name, value in _named(batch):
        if name.endswith("edge_index") and isinstance(value, Tensor):
            raise ValueError(
                f"The batch has a `{name}` of shape {tuple(value.shape)}, which names rows by their place in the whole"
                " batch, so that a pipeline cannot cut the batch into micro-batches of some rows (nodes) each. Use"
                " num_microbatches=1 and more copies (data_parallel_size=), or give every graph as a row: dense"
                " tensors (graph, node, ...), padded, with an adjacency tensor (graph, node, node)."
            )


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """What a batch's mappings and objects hold, by their names."""
    fields: Mapping[Any, Any] = {}
    if isinstance(tree, Mapping):
        fields = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = dict(zip(tree._fields, tree, strict=True))
    for name, value in fields.items():
        yield str(name), value
        yield from _named(value)
    if isinstance(tree, (list, tuple)) and not fields and not _is_row_list(tree):
        for value in tree:
            yield from _named(value)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf of a batch; mappings, sequences and dataclasses keep their type."""
    if isinstance(tree, Mapping):
        new = {key: map_leaves(function, value) for key, value in tree.items()}
        if type(tree) is dict:
            return new
        clone: Any = copy.copy(tree)
        if hasattr(tree, "data") and isinstance(tree.data, dict):  # UserDict, and with it transformers' BatchEncoding
            clone.data = dict(tree.data)
        clone.update(new)
        return clone
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, (list, tuple)) and not _is_row_list(tree):
        return type(tree)(map_leaves(function, value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: map_leaves(function, getattr(tree, f.name)) for f in dataclasses.fields(tree)}
        clone = copy.copy(tree)
        for name, value in fields.items():
            object.__setattr__(clone, name, value)
        return clone
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf of a batch, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)) and not _is_row_list(tree):
        for value in tree:
            yield from leaves(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def signature(batch: Any) -> tuple[Any, ...]:
    """What of a batch decides the shapes in a step: tensors' shapes and dtypes, and the plain arguments."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf if isinstance(leaf, (int, bool, type(None))) else type(leaf)
        for leaf in leaves(batch)
    )  # fmt: skip


def join(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float | Tensor]) -> Any:
    """Join what a step returned for each micro-batch into what it would have returned for the whole batch.

    Tensors with one entry a row are concatenated and lists with one entry a row chained; of other tensors integers are
    counts and are added up, floats are averaged with `weights` (which sum to 1); anything else is the last one's.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: join([out[key] for out in outputs], sizes, weights) for key in first}
    if isinstance(first, (list, tuple)):
        if all(len(out) == size and _is_by_row(out, size) for out, size in zip(outputs, sizes, strict=True)):
            return type(first)(entry for out in outputs for entry in out)
        columns = [join(column, sizes, weights) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, Tensor):
        if first.dim() > 0 and all(out.shape[0] == size for out, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if not first.is_floating_point() and not first.is_complex():
            return sum(outputs[1:], first)
        return weighted_sum(outputs, weights)
    return outputs[-1]


def _is_by_row(value: Any, rows: int) -> bool:
    """Whether a list holds one entry a row: plain values, or structures whose tensors have no dimension for rows."""
    if not isinstance(value, list) or _is_row_list(value):
        return _is_row_list(value)
    tensors = [leaf for entry in value for leaf in leaves(entry) if isinstance(leaf, Tensor)]
    return not any(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors)


def weighted_sum(values: Sequence[Any], weights: Sequence[float | Tensor]) -> Any:
    """Sum of value x weight. What weighs nothing adds nothing, even where it is not a number (the mean of no terms).

    Example:
        >>> weighted_sum([torch.tensor(2.0), torch.tensor(float("nan"))], [1.0, 0.0])
        tensor(2.)
    """
    if all(isinstance(value, Tensor) and value.dim() == 0 for value in values) and _are_equal_numbers(weights):
        return torch.stack(list(values)).sum() * weights[0]  # three kernels, however many values
    terms = [_weighted(value, weight) for value, weight in zip(values, weights, strict=True)]
    return sum(terms[1:], terms[0])


def _are_equal_numbers(weights: Sequence[float | Tensor]) -> bool:
    """Whether all weigh the same, and something."""
    return not any(isinstance(weight, Tensor) for weight in weights) and {*weights} == {weights[0]} != {0}


def _weighted(value: Any, weight: float | Tensor) -> Any:
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(weight), value * weight)
    if weight == 0:
        return torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
    return value * weight


def _is_row_list(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and all(isinstance(x, _PLAIN) for x in value)
    )
