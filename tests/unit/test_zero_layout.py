"""Buckets hold as many neighbours as fit, and ranks equal parts of them."""

import pytest

from lightning_parallel.zero.native.layout import fill_buckets, lay_out


@pytest.mark.parametrize(
    ("nbytes", "limit", "wanted"),
    [
        ([8, 8, 8, 8], 16, [[0, 1], [2, 3]]),  # exactly full
        ([8, 8, 8, 8], 17, [[0, 1], [2, 3]]),
        ([8, 8, 8, 8], 15, [[0], [1], [2], [3]]),
        ([16, 8, 8], 16, [[0], [1, 2]]),
        ([4, 40, 4, 4], 16, [[0], [1], [2, 3]]),  # one is larger than a bucket
        ([0, 4, 0], 4, [[0, 1, 2]]),
        ([], 4, []),
    ],
)
def test_a_bucket_is_filled_to_the_last_byte(nbytes: list[int], limit: int, wanted: list[list[int]]):
    assert fill_buckets(["a"] * len(nbytes), nbytes, limit) == wanted


def test_buckets_end_where_the_key_changes():
    assert fill_buckets("aabba", [4] * 5, 100) == [[0, 1], [2, 3], [4]]
    assert fill_buckets("abb", [4, 0, 4], 100) == [[0], [1, 2]]  # an empty parameter is of its own dtype's bucket


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_element_has_one_owner_and_parts_are_equal(ranks: int):
    numels = [5, 4, 1, 9]
    layout = lay_out(numels, ranks, itemsize=4)
    assert layout.offsets == (0, 8, 12, 16)  # multiples of 16 bytes
    assert layout.part % 4 == 0 and layout.numel == layout.part * ranks >= 25 > (layout.part - 4) * ranks
    for index, numel in enumerate(numels):
        pieces = [layout.piece(index, rank) for rank in range(ranks)]
        held = [piece for piece in pieces if piece != (0, 0)]
        assert [begin for begin, _ in held] == [0, *(end for _, end in held[:-1])] and held[-1][1] == numel
        for rank, (begin, end) in enumerate(pieces):
            place = range(rank * layout.part, (rank + 1) * layout.part)
            assert begin == end or (layout.offsets[index] + begin in place and layout.offsets[index] + end - 1 in place)


def test_elements_larger_than_the_alignment_need_no_padding():
    layout = lay_out([5, 4], ranks=2, itemsize=32)
    assert (layout.offsets, layout.part, layout.numel) == ((0, 5), 5, 10)
