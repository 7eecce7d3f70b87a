"""A short last batch crashed, or one rank waited for ever at the end of the epoch."""

from tests.trainer.modules import Classifier, row_dataset
from tests.trainer.pipelines import Case, assert_parity


def test_twelve_rows_in_batches_of_eight_train_and_validate():
    case = Case(Classifier, lambda: row_dataset(12, 8), trainer={"max_epochs": 2})
    [record] = assert_parity(case, stages=(2,))
    assert len(record.losses) == 4
