"""Validation counted padded duplicates without a word, and iterables of uneven length hung."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import Classifier, row_dataset, row_loader, rows
from tests.trainer.pipelines import Case, Record, fit, join_as_torchrun


def on_two_copies(case: Case, **strategy: Any) -> list[Record]:
    def run(rank: int, port: int) -> Record:
        join_as_torchrun(rank, 2, port)
        options = {"data_parallel_size": 2, "num_microbatches": 1, **strategy}
        return fit(case, PipelineStrategy(**options), 2)

    return run_ranks(run, 2, free_port(), group=False, timeout=50.0)


class Uneven(IterableDataset):
    """Three batches on the first copy, four on the second."""

    def __iter__(self) -> Iterator[Any]:
        yield from rows([4] * (3 + int(os.environ["RANK"])))


@pytest.mark.parametrize("validate", [False, True])
def test_iterables_of_uneven_length_end_in_words(validate: bool):
    loader = lambda: DataLoader(Uneven(), batch_size=None)  # noqa: E731
    case = Case(Classifier, loader, trainer={"max_epochs": 2}, validation=row_loader, validate=validate)
    with pytest.raises(Exception, match="1 of 2 copies of the model have come to the end of their training batches"):
        on_two_copies(case)


def test_padded_rows_count_as_lightning_documents():
    """Five rows on two copies: the sampler repeats the first, and the mean over copies counts it twice."""
    case = Case(
        Shared,
        lambda: row_dataset(8, 4),
        validation=lambda: row_dataset(5, 1),
        trainer={"max_epochs": 1, "max_steps": 1},
    )
    ours = on_two_copies(case)
    for record in ours:
        x, y = row_dataset(5, 5).dataset.tensors
        module = Shared()
        module.load_state_dict(ours[0].weights)
        with torch.no_grad():
            losses = F.cross_entropy(module(x), y, reduction="none")
        dealt = torch.cat([losses, losses[:1]])
        torch.testing.assert_close(record.final["callback/val_loss"], dealt.mean(), rtol=1e-5, atol=1e-6)


class Shared(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
