"""Fewer micro-batches than stages hung."""

import pytest

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_micro_batches_on_four_stages(schedule: str):
    assert_parity(Case(Classifier, row_loader, {"num_microbatches": 2, "schedule": schedule}), stages=(4,))


def test_a_batch_of_two_rows_on_four_stages():
    assert_parity(Case(Classifier, lambda: row_loader((2, 1, 8)), {"num_microbatches": 8}), stages=(4,))
