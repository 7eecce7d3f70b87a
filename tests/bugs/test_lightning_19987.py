"""The last window of accumulated gradients, shorter than the others, was scaled otherwise."""

import pytest

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


@pytest.mark.parametrize("accumulate", [4, 8])
def test_five_batches_step_as_lightning_steps(accumulate: int):
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    for record in assert_parity(Case(Classifier, lambda: row_loader((8, 5, 8, 8, 3)), trainer=options)):
        assert len(record.losses) == 10
