"""An evaluation before the first training step broke training."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity, assert_same, fit, join_as_torchrun, make_trainer, one_process


def test_sanity_check_of_other_sizes_first():
    assert_parity(
        Case(Classifier, row_loader, trainer={"num_sanity_val_steps": 2}, validation=lambda: row_loader((3, 8)))
    )


def test_validate_with_one_trainer_then_fit_with_another():
    module: list[LightningModule] = []

    def make() -> LightningModule:
        if not module:
            module.append(Classifier())
        return module[0]

    case = Case(make, row_loader)

    def run(rank: int, port: int) -> Any:
        join_as_torchrun(rank, 2, port)
        import torch

        torch.manual_seed(1)
        make_trainer(PipelineStrategy(num_microbatches=4), 2).validate(make(), row_loader((5, 8)), verbose=False)
        return fit(case, PipelineStrategy(num_microbatches=4), 2)

    records = run_ranks(run, 2, free_port(), group=False)
    assert_same(records, one_process(case))
