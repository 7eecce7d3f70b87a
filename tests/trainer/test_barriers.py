"""A rank alone in `strategy.barrier()`, as in `if trainer.is_global_zero:`, ends the run in words on every rank."""

import re
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_parallel.errors import StageError
from tests.harness import free_port, rank_outcomes
from tests.trainer.hybrids import Mesh, gpt_case, token_loader
from tests.trainer.pipelines import fit, join_as_torchrun
from tests.trainer.watched import QUICK


class Alone(Callback):
    """Rank 0 waits for the others in a hook, and they do not come."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step:
            trainer.strategy.barrier("mine")


class Apart(Callback):
    """Ranks wait for each other at different places."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        trainer.strategy.barrier("before all")
        trainer.strategy.barrier("its" if trainer.global_rank else "mine")


STUCK = r"every rank has waited for another one for .*rank 0\): the other ranks to call strategy.barrier\('mine'\) too"
APART = "Ranks wait for each other at different barriers: rank 0 at 'mine'; rank 1 at 'its'. Every rank has to"


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("mesh", "callback", "words"),
    [
        pytest.param(Mesh(2), Alone, STUCK, id="copies"),
        pytest.param(Mesh(1, 2), Alone, STUCK, id="stages", marks=pytest.mark.slow),
        pytest.param(Mesh(1, 1, 2), Alone, STUCK, id="tensor", marks=pytest.mark.slow),
        pytest.param(Mesh(2, options={"zero_stage": 3}), Alone, STUCK, id="zero 3", marks=pytest.mark.slow),
        pytest.param(Mesh(2), Apart, APART, id="two barriers"),
    ],
)
def test_a_rank_alone_in_a_barrier_ends_all_in_words(mesh: Mesh, callback: type[Callback], words: str):
    case = gpt_case(callbacks=lambda: [callback()])

    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        strategy = Mesh(mesh.data, mesh.pipeline, mesh.tensor, {**mesh.options, "patience": QUICK}).strategy()
        fit(case.but(loader=lambda: token_loader(mesh.data, mesh.place(rank))), strategy, 2)

    outcomes = rank_outcomes(run, 2, free_port(), group=False, timeout=60.0)
    kind = ValueError if callback is Apart else StageError
    assert all(type(outcome.error) is kind for outcome in outcomes), [o.text for o in outcomes]
    assert all(re.search(words, str(outcome.error), re.DOTALL) for outcome in outcomes), str(outcomes[0].error)
    assert max(outcome.seconds for outcome in outcomes) < 30
