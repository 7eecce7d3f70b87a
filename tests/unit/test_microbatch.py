"""Cutting a batch keeps the user's structure; joining gives what one process returns."""

import dataclasses
from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_parallel.pipeline.batch.microbatch import (
    join,
    leaves,
    map_leaves,
    row_sizes,
    signature,
    split,
    weighted_sum,
)
from lightning_parallel.pipeline.batch.rows import count_rows


class Pair(NamedTuple):
    x: Tensor
    names: list


@dataclasses.dataclass(frozen=True)
class Item:
    x: Tensor
    scale: float


class Encoding(UserDict):
    """As the `BatchEncoding` of `transformers`: a mapping with something beside its items."""

    def __init__(self, data, kind):
        super().__init__(data)
        self.kind = kind


@given(st.integers(1, 500), st.integers(1, 64))
def test_sizes_are_even_and_none_is_empty(rows: int, num_microbatches: int):
    sizes = row_sizes(rows, num_microbatches)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, num_microbatches)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 30), st.integers(1, 8))
def test_cut_rows_join_to_the_same_batch(rows: int, num_microbatches: int):
    batch = {"x": torch.arange(rows * 2).view(rows, 2), "y": (torch.arange(rows), [f"r{i}" for i in range(rows)])}
    sizes = row_sizes(rows, num_microbatches)
    parts = split(batch, sizes)
    assert [len(part["x"]) for part in parts] == [len(part["y"][1]) for part in parts] == sizes
    joined = join(parts, sizes, [size / rows for size in sizes])
    assert torch.equal(joined["x"], batch["x"])
    assert torch.equal(joined["y"][0], batch["y"][0])
    assert joined["y"][1] == batch["y"][1]


def test_every_container_keeps_its_type_and_what_is_no_row_goes_to_all():
    x, mask = torch.arange(4.0), torch.ones(3, 3)
    batch = {
        "pair": Pair(x, ["a", "b", "c", "d"]), "item": Item(x, 0.5), "ordered": OrderedDict(x=x),
        "encoding": Encoding({"x": x}, "kind"), "mask": mask, "scalar": torch.tensor(2.0), "tag": "a tag", "none": None,
        "three": [1, 2, 3], "tensors": [x, x],
    }  # fmt: skip
    first, second = split(batch, [3, 1])
    assert type(first["pair"]) is Pair and first["pair"].names == ["a", "b", "c"] and second["pair"].names == ["d"]
    assert type(second["item"]) is Item and second["item"].x.tolist() == [3.0] and second["item"].scale == 0.5
    assert type(first["ordered"]) is OrderedDict
    assert (
        type(first["encoding"]) is Encoding and first["encoding"].kind == "kind" and len(second["encoding"]["x"]) == 1
    )
    assert first["mask"] is mask and second["three"] == [1, 2, 3] and second["tag"] == "a tag" and first["none"] is None
    assert first["scalar"] is batch["scalar"]
    assert [len(part) for part in first["tensors"]] == [3, 3]
    assert len(batch["item"].x) == len(batch["encoding"]["x"]) == 4, "the user's batch is left as it was"


def test_one_micro_batch_is_the_batch_itself():
    batch = {"x": torch.ones(3)}
    assert split(batch, [3])[0] is batch


def test_rows_are_counted_by_the_first_tensor_with_a_dimension():
    assert count_rows(("tag", torch.tensor(1.0), [torch.ones(5, 2)])) == 5
    message = "got a batch of type dict without a tensor that has a first dimension, and cannot count its rows"
    with pytest.raises(ValueError, match=message):
        count_rows({"names": ["a"], "scale": torch.tensor(1.0)})


IMAGES = [torch.full((3, 2, 2), float(i)) for i in range(4)]
BOXES = [{"boxes": torch.full((i + 1, 4), float(i)), "id": i} for i in range(4)]


def test_a_list_of_one_entry_a_row_is_cut():
    batch = {"x": torch.arange(4.0), "boxes": BOXES, "tokens": [[1], [2, 3], [4], [5, 6, 7]], "ragged": [*"abcd"]}
    batch["spectra"] = [torch.zeros(length, 2) for length in (4, 3, 4, 5)]
    first, second = split(batch, [3, 1])
    assert first["boxes"] == BOXES[:3] and second["boxes"] == BOXES[3:]
    assert first["tokens"] == [[1], [2, 3], [4]] and second["tokens"] == [[5, 6, 7]]
    assert [len(x) for x in first["spectra"]] == [4, 3, 4] and len(second["spectra"]) == 1


def test_columns_in_a_list_are_cut_each():
    x, y = torch.zeros(2, 5), torch.ones(2, 5)
    assert count_rows([x, y]) == 2
    assert [[len(part) for part in column] for column in split([x, y], [1, 1])] == [[1, 1], [1, 1]]
    pairs = [[torch.zeros(8, 6), torch.zeros(8)], [torch.zeros(4, 6), torch.zeros(4)]]  # of two loaders
    assert count_rows(pairs) == 8
    assert count_rows([{"x": torch.zeros(8, 6), "y": torch.zeros(8), "n": 8}] * 2) == 8


@pytest.mark.parametrize(
    "batch",
    [
        (tuple(IMAGES), tuple(BOXES)), (IMAGES, [0, 1, 2, 0]), {"image": IMAGES, "target": BOXES},
        list(zip(IMAGES, BOXES, strict=True)), list(zip(IMAGES, range(4), strict=True)),
    ],
)  # fmt: skip
def test_samples_are_rows_where_nothing_is_stacked(batch):
    assert count_rows(batch) == 4
    first, second = split(batch, [3, 1])
    assert type(first) is type(batch)
    columns = batch.values() if isinstance(batch, dict) else batch
    if len(columns) == 4:
        assert first == batch[:3] and second == batch[3:]
    else:
        name = "image" if isinstance(batch, dict) else 0
        assert [*first[name]] == IMAGES[:3] and [*second[name]] == IMAGES[3:]


class Opaque:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Opaque(torch.zeros(4, 2)), "has an object of type Opaque whose x have 4 entries. A pipeline cuts"),
        (pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)]), "has a PackedSequence, whose rows lie mixed"),
        (torch.eye(4).to_sparse(), "batch of 4 rows has a sparse tensor of 4 entries"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(value, words):
    with pytest.raises(ValueError, match=words):
        split({"y": torch.zeros(4), "value": value}, [2, 2])
    assert split({"y": torch.zeros(4), "value": value}, [4])[0]["value"] is value


def test_outputs_join_as_one_process_returns_them():
    outputs = [
        {"loss": torch.tensor(2.0), "logits": torch.zeros(3, 2), "names": ["a", "b", "c"], "tag": "x"},
        {"loss": torch.tensor(6.0), "logits": torch.ones(1, 2), "names": ["d"], "tag": "y"},
    ]
    joined = join(outputs, [3, 1], [0.75, 0.25])
    assert joined["loss"] == 3.0 and joined["tag"] == "y"
    assert joined["logits"].tolist() == [[0, 0]] * 3 + [[1, 1]]
    assert joined["names"] == ["a", "b", "c", "d"]


def test_joining_keeps_named_tuples():
    outputs = [Pair(torch.ones(2), ["a", "b"]), Pair(torch.zeros(1), ["c"])]
    joined = join(outputs, [2, 1], [2 / 3, 1 / 3])
    assert type(joined) is Pair and joined.names == ["a", "b", "c"]


@pytest.mark.parametrize("weigh", [float, torch.tensor])
def test_what_weighs_nothing_adds_nothing(weigh):
    values = [torch.tensor(float("nan")), torch.tensor(3.0), torch.tensor(5.0)]
    assert weighted_sum(values, [weigh(0.0), weigh(0.5), weigh(0.5)]) == 4.0
    assert weighted_sum(values[:2], [weigh(0.5), weigh(0.5)]).isnan(), "a loss that is not a number is shown"
    assert weighted_sum([float("nan"), 3.0], [weigh(0.0), weigh(1.0)]) == 3.0


def test_signatures_tell_shapes_dtypes_and_plain_arguments_apart():
    batch = {"x": torch.ones(2, 3), "k": 3, "flag": True, "name": "a", "scale": 0.5}
    same = {"x": torch.zeros(2, 3), "k": 3, "flag": True, "name": "b", "scale": 0.7}
    assert signature(batch) == signature(same)
    assert hash(signature(batch)) == hash(signature(same))
    for key, value in {"x": torch.ones(2, 4), "k": 4, "flag": False}.items():
        assert signature({**batch, key: value}) != signature(batch)
    assert signature({**batch, "x": torch.ones(2, 3, dtype=torch.float64)}) != signature(batch)


def test_mapping_over_leaves_visits_each_once():
    batch = {"x": 1, "y": (2, {"z": None}), "names": ["a", "b"]}
    assert list(leaves(batch)) == [1, 2, None, ["a", "b"]]
    assert map_leaves(lambda leaf: leaf if leaf is None else leaf * 2, batch) == {
        "x": 2, "y": (4, {"z": None}), "names": ["a", "b", "a", "b"],
    }  # fmt: skip
