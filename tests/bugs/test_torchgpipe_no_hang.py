"""An exception in one stage left the other processes waiting for ever."""

import time
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, rank_outcomes
from tests.trainer.modules import Classifier, chain, row_loader, rows
from tests.trainer.pipelines import Case, fit, join_as_torchrun


class Explodes(nn.Module):
    """Fails in its third call."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer, self.calls, self.stage = nn.Linear(6, 6), 0, stage

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the user's own words")
        return self.layer(x)


class FailsInAStage(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 6), Explodes(1), *chain(3)))


class FailsToConfigure(Classifier):
    def configure_optimizers(self) -> Any:
        if self.trainer.global_rank == 1:
            raise ValueError("the user's own words")
        return super().configure_optimizers()


class FailsInACallback(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("the user's own words")


class Broken(IterableDataset):
    def __iter__(self) -> Any:
        yield from rows((8, 8))
        raise ValueError("the user's own words")


IN_THE_STAGE = "stage 1 (rank 0) failed in the forward of micro-batch 2\n"
WITH_A_CALLBACK = {"callbacks": lambda: [FailsInACallback()]}
CASES = {
    "stage": (Case(FailsInAStage, row_loader, {"partition": [1, 6]}, validate=False), IN_THE_STAGE),
    "configure_optimizers": (Case(FailsToConfigure, row_loader, validate=False), "configure_optimizers"),
    "callback": (Case(Classifier, row_loader, trainer=WITH_A_CALLBACK, validate=False), "on_train_batch_end"),
    "loader": (Case(Classifier, lambda: DataLoader(Broken(), batch_size=None), validate=False), "the data loader"),
}


@pytest.mark.parametrize("where", CASES)
def test_every_process_ends_with_the_users_error(where: str):
    case, text = CASES[where]

    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        fit(case, PipelineStrategy(num_microbatches=4, **case.strategy), 2)

    started = time.monotonic()
    outcomes = rank_outcomes(run, 2, free_port(), group=False, timeout=30.0)
    assert time.monotonic() - started < 30.0
    for outcome in outcomes:
        assert type(outcome.error) is ValueError, outcome.text
        assert str(outcome.error) == "the user's own words"
        assert text in outcome.error.__notes__[-1]
