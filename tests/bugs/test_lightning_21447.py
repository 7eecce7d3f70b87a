"""Ranks of one model copy got different rows without a word."""

import os
import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from tests.trainer.modules import Classifier, row_dataset, row_loader, rows
from tests.trainer.pipelines import Case, assert_ranks_agree, assert_same, failure_of, on_stages, one_process


class Unseeded(Classifier):
    """Ranks that were not seeded alike, as when the user seeds nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(100 + int(os.environ.get("RANK", 0)))
        random.seed(int(os.environ.get("RANK", 0)))


class Rows(IterableDataset):
    """Draws its rows from torch's generator, on each rank for itself."""

    def __iter__(self) -> Iterator:
        for _ in range(3):
            yield torch.randn(8, 6), torch.randint(3, (8,))


class ByRank(Sampler):
    """A sampler of the user's that deals rows to ranks."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ.get("RANK", 0)), 24, int(os.environ.get("WORLD_SIZE", 1))))

    def __len__(self) -> int:
        return 12


def sampled(sampler: Sampler) -> DataLoader:
    return DataLoader(TensorDataset(*rows([24])[0]), 4, sampler=sampler)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: row_dataset(24, 8, shuffle=True),
        lambda: DataLoader(Rows(), batch_size=None),
        lambda: sampled(RandomSampler(range(24))),
    ],
    ids=["shuffle", "iterable", "sampler"],
)
@pytest.mark.parametrize("distributed_sampler", [True, False])
def test_rows_are_the_same_within_a_copy(loader, distributed_sampler: bool):
    options = {"use_distributed_sampler": distributed_sampler}
    case = Case(Unseeded, loader, trainer=options, validation=row_loader)
    records = on_stages(case, 2)
    assert_ranks_agree(records)
    assert_same(records, one_process(case))


def test_a_sampler_that_deals_rows_to_ranks_is_refused_at_the_first_step():
    message = failure_of(Case(Classifier, lambda: sampled(ByRank()), validation=row_loader))
    assert message.startswith(
        "The ranks of one model copy got different rows in training batch 0 (rank 1 unlike rank 0). All stages"
    )
    assert "seed shuffling and augmentation alike" in message
