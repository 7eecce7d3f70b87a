"""Batches that have rows and cannot be cut into micro-batches of some rows each, refused in words.

The one idea: what lies mixed in one tensor, names rows by their place, or hides in an object would be wrong in silence
or fail in the user's code. Left out: what has another number of entries than the batch has rows; it goes to all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_parallel.pipeline.batch.rows import children, is_plain_list, nodes


def refuse_what_cannot_be_cut(batch: Any, rows: int) -> None:
    """Raise for what holds the rows of a batch where they cannot be cut.

    Raises:
        ValueError: a graph, a packed sequence, a sparse or nested tensor, or tensors of an object that is no tuple,
            list, mapping or dataclass.
    """
    _refuse_graph(batch)
    for node in nodes(batch):
        if isinstance(node, PackedSequence):
            raise ValueError(
                "The batch has a PackedSequence, whose rows lie mixed in one tensor, so that a pipeline cannot cut it"
                " into micro-batches. Give padded sequences and their lengths, and pack them in the model's forward, or"
                " use num_microbatches=1."
            )
        if isinstance(node, Tensor):
            _refuse_layout(node, rows)
        elif children(node) is None:
            _refuse_object(node, rows)


def _refuse_layout(tensor: Tensor, rows: int) -> None:
    if (tensor.is_nested or tensor.layout != torch.strided) and tensor.size(0) == rows:
        raise ValueError(
            f"The batch of {rows} rows has a {'nested' if tensor.is_nested else 'sparse'} tensor of {rows} entries,"
            " which a pipeline cannot cut into micro-batches. Give a dense (padded) one and convert it in the model's"
            " forward, or use num_microbatches=1."
        )


def _refuse_object(value: Any, rows: int) -> None:
    """Raise for an object of the user's with tensors of one entry a row."""
    held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    names = [name for name, x in held.items() if isinstance(x, Tensor) and x.dim() > 0 and x.size(0) == rows]
    if names:
        kind = type(value).__name__
        raise ValueError(
            f"The batch of {rows} rows has an object of type {kind} whose {' and '.join(names)} have {rows} entries. A"
            " pipeline cuts what lies in tuples, lists, mappings and dataclasses into micro-batches, and does not look"
            f" into other objects. Make {kind} a dataclass, or use num_microbatches=1."
        )


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
    if isinstance(tree, (list, tuple)) and not fields and not is_plain_list(tree):
        for value in tree:
            yield from _named(value)
