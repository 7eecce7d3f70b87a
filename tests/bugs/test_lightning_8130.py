"""The user's traceback was lost behind the launcher's."""

from typing import Any

import pytest
from torch import Tensor

from lightning_parallel.strategies import PipelineStrategy
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise LookupError("the user's own words")
        return super().training_step(batch, batch_idx)


def test_the_exception_of_a_child_is_shown_as_it_was():
    trainer = make_trainer(PipelineStrategy(num_microbatches=4, start_method="fork"), 2)
    with pytest.raises(LookupError, match=r"stage 0 \(rank 1\) failed in the forward of micro-batch 0\n") as caught:
        trainer.fit(Fails(), row_loader(), row_loader())
    assert type(caught.value) is LookupError
    assert str(caught.value) == "the user's own words"
    assert 'raise LookupError("the user\'s own words")' in caught.value.__notes__[0]
