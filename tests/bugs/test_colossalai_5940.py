"""The second batch had another sequence length, and the stages used the buffers of the first."""

from lightning.pytorch import LightningModule, Trainer

from lightning_parallel.demo import GPT
from tests.trainer.modules import token_loader
from tests.trainer.pipelines import WEIGHTS, Case, assert_same, many_on_stages, one_process
from tests.trainer.test_parity import KEY_BIAS


def num_agreements(trainer: Trainer, module: LightningModule) -> int | None:
    [executor] = trainer.strategy.pipeline.engine.executors.values()
    departure = executor.departure
    return None if departure is None else len(departure._contracts)


def test_lengths_change_and_stages_agree_once_a_length():
    case = Case(
        lambda: GPT(vocabulary=11, context=16, width=16, num_heads=2), trainer={"max_epochs": 2, "max_steps": 6},
        validate=False, loader=lambda: token_loader(((8, 5), (8, 7), (8, 5))), at_end=num_agreements,
    )  # fmt: skip
    [records] = many_on_stages([case], 2)
    assert_same(records, one_process(case.but(at_end=None)), weights=WEIGHTS, leave_out=KEY_BIAS)
    assert [record.extra for record in records] == [None, 2]
