"""What the fields of a batch are: one entry a row, or the same for all rows; told by shape, or declared.

The one idea: a field is called by its place in the batch ("x", "inputs.mask", "1" for the second of a tuple). What was
declared holds. Of what was not, a tensor or list with one entry a row is cut and everything else goes whole to every
micro-batch, and that is remembered: what goes whole has been compared with the whole batch as it was then, so another
content under the same shape (offsets of documents, pointers of ragged rows) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_parallel.pipeline.batch.rows import count_rows, is_plain_list, map_named, named_children, row_lists

FieldKind = Literal["rows", "whole"]
Name = tuple[str, ...]
KINDS = get_args(FieldKind)


class BatchFields:
    """What was declared of a batch's fields.

    Args:
        declared: {name: "rows" or "whole"}; a name is a key, a position or the name of an attribute, or several of
            these joined by dots. What lies deeper in a declared field is of its kind too.

    Example:
        >>> fields = BatchFields({"mask": "whole", 1: "rows"})
        >>> fields.kind(("mask",)), fields.kind(("1", "x")), fields.kind(("x",))
        ('whole', 'rows', None)
    """

    def __init__(self, declared: Mapping[Any, FieldKind] | None = None) -> None:
        self.declared = {tuple(str(name).split(".")): kind for name, kind in (declared or {}).items()}

    def kind(self, name: Name) -> FieldKind | None:
        """What a field was declared as, if it was."""
        if not self.declared:
            return None
        prefixes = (name[:length] for length in range(len(name), 0, -1))
        return next((self.declared[prefix] for prefix in prefixes if prefix in self.declared), None)

    def but(self, name: Name, kind: FieldKind) -> BatchFields:
        """The same, with one more field declared."""
        new = BatchFields()
        new.declared = {**self.declared, name: kind}
        return new

    def without_whole(self, batch: Any) -> Any:
        """The batch with None in place of what was declared to be whole."""
        if "whole" not in self.declared.values():
            return batch
        is_whole = lambda value, name: self.kind(name) == "whole"  # noqa: E731
        return map_named(lambda leaf, name: None if is_whole(leaf, name) else leaf, batch, is_whole)

    def count_rows(self, batch: Any) -> int:
        """The number of rows of a batch; see `count_rows`.

        Raises:
            ValueError: they cannot be counted.
        """
        return count_rows(self.without_whole(batch))

    def unknown(self, batch: Any) -> list[str]:
        """Declared names that a batch does not have."""
        names = {name[:length] for name, _ in named_leaves(batch) for length in range(1, len(name) + 1)}
        return [".".join(name) for name in self.declared if name not in names]


def named_leaves(
    batch: Any, is_leaf: Callable[[Any], bool] = is_plain_list, name: Name = ()
) -> Iterator[tuple[Name, Any]]:
    """Every leaf of a batch with its name.

    Example:
        >>> [(".".join(name), leaf) for name, leaf in named_leaves(({"a": 1, "b": ["u", "v"]}, 2))]
        [('0.a', 1), ('0.b', ['u', 'v']), ('1', 2)]
    """
    inner = None if is_leaf(batch) else named_children(batch)
    if inner is None:
        yield name, batch
    else:
        for part, value in inner:
            yield from named_leaves(value, is_leaf, (*name, part))


@dataclass
class Cutting:
    """How the fields of one batch are cut.

    Attributes:
        entries: of every leaf that is cut, how many entries a row has.
        whole: the leaves that nobody declared and that go whole to every micro-batch, though they have entries.
    """

    entries: dict[Name, int] = field(default_factory=dict)
    whole: dict[Name, Any] = field(default_factory=dict)


def cutting(batch: Any, rows: int, fields: BatchFields, known: Callable[[Name, Any], bool] | None = None) -> Cutting:
    """Tell which fields of a batch of `rows` rows are cut.

    Args:
        batch: the batch.
        rows: how many rows it has.
        fields: what was declared.
        known: whether a field that looks like rows is one that is the same in every batch.

    Raises:
        ValueError: what was declared to have rows has not.

    Example:
        >>> batch = {"x": torch.zeros(4, 2), "table": torch.zeros(3, 2), "views": torch.zeros(8)}
        >>> cutting(batch, 4, BatchFields({"views": "rows"})).entries
        {('x',): 1, ('views',): 2}
    """
    found, is_row_list = Cutting(), row_lists(fields.without_whole(batch), rows)

    for name, leaf in named_leaves(batch, lambda value: is_row_list(value) or is_plain_list(value)):
        kind, length = fields.kind(name), _length(leaf, is_row_list)
        if kind == "rows" and length is not None:
            if length % rows:
                raise ValueError(
                    f"batch_fields={{{'.'.join(name)!r}: 'rows'}}: the field has {length} entries in a batch of {rows}"
                    " rows, which is no multiple. Declare it 'whole' if it is the same for all rows, or give it as many"
                    " entries for every row."
                )
            found.entries[name] = length // rows
        elif kind is None and length == rows and not (known is not None and known(name, leaf)):
            found.entries[name] = 1
        elif kind is None and length is not None:
            found.whole[name] = leaf
    return found


def _length(leaf: Any, is_row_list: Callable[[Any], bool]) -> int | None:
    """Entries of what can be cut; None for everything else."""
    if isinstance(leaf, Tensor):
        return leaf.size(0) if leaf.dim() > 0 else None
    return len(leaf) if is_row_list(leaf) or is_plain_list(leaf) else None


class FieldMemory:
    """What the undeclared fields of one kind of batches were when they were compared with the whole batch.

    Args:
        fields: what was declared.
    """

    def __init__(self, fields: BatchFields) -> None:
        self.fields = fields
        self._cut: set[Name] = set()
        self._contents: dict[Name, dict[Hashable, Any]] = {}
        self._declared: dict[Name, tuple[Any, int]] = {}  # content of what was declared whole, and how often it changed
        self._asked: list[tuple[Name, Any, Tensor, Any]] = []  # comparisons that a device has been asked for

    def cutting(self, batch: Any, rows: int) -> Cutting:
        """How a batch is cut, where a field is what it was in earlier batches."""
        return cutting(batch, rows, self.fields, self._is_constant)

    def _is_constant(self, name: Name, leaf: Any) -> bool:
        """Whether a field with as many entries as there are rows went whole to earlier micro-batches as it is."""
        content = self._contents.get(name, {}).get(_shape(leaf))
        return content is not None and _equal(content, leaf)

    def look(self, batch: Any, found: Cutting, rows: int) -> bool:
        """Remember the fields of a batch that will be cut; whether they have to be compared with the whole batch.

        Raises:
            ValueError: a field cannot be told: it has rows in one batch and none in another, or goes whole to every
                micro-batch and is another one than before.
        """
        self.hear()
        new = self._look_declared(batch)
        for name in found.entries.keys() - self.fields.declared.keys():
            if name in self._contents:
                raise ValueError(
                    _unclear(name, f"{rows} entries, as many as rows, and another number in batches before")
                )
        self._cut |= found.entries.keys()
        for name, leaf in found.whole.items():
            if name in self._cut:
                raise ValueError(
                    _unclear(name, f"{len(leaf)} entries for {rows} rows, and one a row in batches before")
                )
            contents, shape = self._contents.setdefault(name, {}), _shape(leaf)
            if shape not in contents:
                contents[shape] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
                new = True
            else:
                self._compare(name, leaf, contents[shape], rows)
        return new

    def _look_declared(self, batch: Any) -> bool:
        """Whether what was declared whole is another one for the 1st, 2nd, 4th, 8th, ... time."""
        new = False
        for name, leaf in named_leaves(batch) if "whole" in self.fields.declared.values() else ():
            if self.fields.kind(name) != "whole" or not isinstance(leaf, (Tensor, list, tuple)):
                continue
            if isinstance(leaf, Tensor) and (leaf.device.type != "cpu" or not leaf.dim()):
                continue  # nobody waits for a device
            content, changes = self._declared.get(name, (None, 0))
            if content is None or _shape(content) != _shape(leaf) or not _equal(content, leaf):
                self._declared[name] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, changes + 1
                new |= changes > 0 and changes & (changes - 1) == 0
        return new

    def _compare(self, name: Name, leaf: Any, content: Any, rows: int) -> None:
        if not isinstance(leaf, Tensor) or leaf.device.type == "cpu":
            if not _equal(content, leaf):
                raise ValueError(_unclear(name, _changed(leaf, rows)))
            return
        told = torch.empty((), dtype=torch.bool, pin_memory=True)
        told.copy_((leaf == content).all(), non_blocking=True)
        self._asked.append((name, _changed(leaf, rows), told, torch.cuda.current_stream(leaf.device).record_event()))

    def hear(self) -> None:
        """Take the answers of a device: what it was asked for before the last step began.

        Raises:
            ValueError: a field is another one than before.
        """
        asked, self._asked = self._asked, []
        for name, words, told, event in asked:
            event.synchronize()
            if not told:
                raise ValueError(_unclear(name, words))


def _changed(leaf: Any, rows: int) -> str:
    return f"{len(leaf)} entries in a batch of {rows} rows, and others than in batches before"


def _unclear(name: Name, has: str) -> str:
    field = ".".join(name)
    return (
        f"The batch's field {field!r} has {has}. A pipeline cuts batches into micro-batches and cannot tell what it is:"
        f' say PipelineStrategy(batch_fields={{"{field}": "rows"}}) if it has entries for every row, one row after the'
        f' other, or batch_fields={{"{field}": "whole"}} if it means the same to any rows of the batch. If it says'
        " where rows or documents lie in the batch (offsets, pointers), give every row its own, or use"
        " num_microbatches=1."
    )


def _shape(leaf: Any) -> Hashable:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else len(leaf)


def _equal(content: Any, leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return bool(content == leaf)
    if not isinstance(content, Tensor) or content.device != leaf.device:
        return False
    return torch.equal(content, leaf) or bool(((content == leaf) | (content.isnan() & leaf.isnan())).all())


__all__ = ["KINDS", "BatchFields", "Cutting", "FieldKind", "FieldMemory", "Name", "cutting", "named_leaves"]
