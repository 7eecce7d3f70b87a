"""Cut a batch into micro-batches, keeping the user's structure, and join what the micro-batches returned.

The one idea: a batch is a tree of mappings, sequences and tensors, and has `rows`. Whatever has one entry a row (a
tensor whose first dimension is `rows`, a list of `rows` strings, numbers or other things of one kind) is cut;
everything else is handed to every micro-batch as it is; `batch_fields` tells which is which. Left out: batches whose
rows lie along another dimension than the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.batch.fields import BatchFields, Cutting, Name, cutting
from lightning_parallel.pipeline.batch.rows import is_plain_list, leaves, map_named, row_lists
from lightning_parallel.pipeline.batch.uncuttable import refuse_what_cannot_be_cut


def row_sizes(rows: int, num_microbatches: int) -> list[int]:
    """Rows of each micro-batch: as even as can be, larger ones first; fewer micro-batches than asked if rows are few.

    Example:
        >>> row_sizes(10, 4), row_sizes(2, 4)
        ([3, 3, 2, 2], [1, 1])
    """
    count = max(1, min(rows, num_microbatches))
    return [rows // count + (i < rows % count) for i in range(count)]


def split(
    batch: Any, sizes: Sequence[int], fields: BatchFields | None = None, found: Cutting | None = None
) -> list[Any]:
    """Cut a batch of sum(sizes) rows into len(sizes) batches of the same structure.

    Args:
        batch: the batch.
        sizes: rows of each micro-batch.
        fields: what was declared of its fields.
        found: which of its fields are cut, if that is known.

    Raises:
        ValueError: it cannot be cut.

    Example:
        >>> split((torch.arange(3), "tag", ["a", "b", "c"]), [2, 1])
        [(tensor([0, 1]), 'tag', ['a', 'b']), (tensor([2]), 'tag', ['c'])]
    """
    if len(sizes) == 1:
        return [batch]
    rows, fields = sum(sizes), fields or BatchFields()
    open_to_doubt = fields.without_whole(batch)
    refuse_what_cannot_be_cut(open_to_doubt, rows)
    entries, is_row_list = (found or cutting(batch, rows, fields)).entries, row_lists(open_to_doubt, rows)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def part(end: int, size: int) -> Any:
        def cut(leaf: Any, name: Name) -> Any:
            count = entries.get(name)
            return leaf if count is None else leaf[(end - size) * count : end * count]

        return map_named(cut, batch, lambda value, name: is_row_list(value) or is_plain_list(value))

    return [part(end, size) for end, size in zip(ends, sizes, strict=True)]


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = is_plain_list) -> Any:
    """Apply a function to every leaf of a batch; mappings, sequences and dataclasses keep their type."""
    return map_named(lambda leaf, name: function(leaf), tree, lambda value, name: is_leaf(value))


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
    if not isinstance(value, list) or is_plain_list(value):
        return is_plain_list(value)
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
