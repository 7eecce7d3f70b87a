"""Ten rows in four micro-batches: later stages kept the first size, and the other rank saw a closed connection."""

from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


def test_rows_that_the_micro_batches_do_not_divide():
    assert_parity(Case(Classifier, lambda: row_loader((10, 10, 7, 10))))


def test_micro_batches_of_a_known_size_after_one_of_a_new_size():
    case = Case(Classifier, lambda: row_loader((4, 5, 9)), {"schedule": "gpipe"}, validate=False)
    assert_parity(case, stages=(2,))
