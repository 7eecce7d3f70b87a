"""A mean over tokens whose number differs by micro-batch: gradients too large, or a mean of means."""

import torch
from torch.utils.data import DataLoader

from tests.trainer.modules import tokens
from tests.trainer.pipelines import Case, assert_parity, failure_of
from tests.trainer.test_parity import masked, num_labels


def loader() -> DataLoader:
    """From full rows to none at all: the last micro-batch of the second batch has no label."""
    first, second = tokens(((8, 8), (8, 8)))
    lengths = (
        torch.tensor([[8], [7], [2], [2], [3], [8], [4], [2]]),
        torch.tensor([[8], [5], [2], [2], [3], [8], [1], [1]]),
    )
    batches = [
        {"input_ids": x, "padding": torch.arange(8)[None] >= n} for x, n in zip((first, second), lengths, strict=True)
    ]
    return DataLoader(batches, batch_size=None)


def test_the_loss_is_one_processs_token_mean():
    case = Case(masked, loader, {"loss_weight": num_labels}, {"max_epochs": 2}, validate=False)
    for record in assert_parity(case):
        assert torch.stack(record.losses).isfinite().all()


def test_rows_as_weights_are_refused():
    assert "The loss is not a mean over rows. Give PipelineStrategy(loss_weight=" in failure_of(
        Case(masked, loader, validate=False)
    )
