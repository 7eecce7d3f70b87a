"""Predictions and evaluations of which the ranks have different numbers of batches: Lightning deals them unpadded."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, Classifier, rows
from tests.trainer.pipelines import LOSS, join_as_torchrun, make_trainer


class Predicts(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=False)


def loader(count: int) -> DataLoader:
    return DataLoader(TensorDataset(*rows([count])[0]), batch_size=1)


def predicted(make: Any, count: int, ranks: int) -> list[list[torch.Tensor]]:
    def on_rank(rank: int, port: int) -> list[torch.Tensor]:
        join_as_torchrun(rank, ranks, port)
        torch.manual_seed(1)
        module, trainer = Predicts(), make_trainer(make(), ranks)
        first = trainer.predict(module, loader(count))
        again = trainer.predict(module, loader(count))  # what was gathered for some is freed
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        return first

    return run_ranks(on_rank, ranks, free_port(), group=False, timeout=50.0)


def expected(count: int) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return Predicts()(rows([count])[0][0])


STRATEGIES = {
    "zero_3": lambda: ZeROStrategy(stage=3),
    "zero_2 by fsdp2": lambda: ZeROStrategy(stage=2, engine="fsdp2"),
    "zero_2": lambda: ZeROStrategy(stage=2),
    "hybrid 3": lambda: HybridStrategy(zero_stage=3),
}


@pytest.mark.parametrize("count", [5, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["zero_3", *(pytest.param(n, marks=pytest.mark.slow) for n in list(STRATEGIES)[1:])])
def test_every_row_is_predicted_once(name: str, count: int):
    of_ranks = predicted(STRATEGIES[name], count, 2)
    assert [len(of) for of in of_ranks] == [(count + 1) // 2, count // 2]
    whole = torch.empty(count, CLASSES)
    for rank, of in enumerate(of_ranks):
        whole[rank::2] = torch.cat(of)
    torch.testing.assert_close(whole, expected(count), **LOSS)


@pytest.mark.slow
def test_three_ranks_with_three_numbers_of_batches():
    """Two go on when one has ended, and one when two have."""

    def on_rank(rank: int, port: int) -> list[torch.Tensor]:
        join_as_torchrun(rank, 3, port)
        torch.manual_seed(1)
        trainer = make_trainer(ZeROStrategy(stage=3), 3, use_distributed_sampler=False)
        return trainer.predict(Predicts(), loader(2 * rank + 1))

    for rank, found in enumerate(run_ranks(on_rank, 3, free_port(), group=False, timeout=50.0)):
        torch.testing.assert_close(torch.cat(found), expected(2 * rank + 1), **LOSS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_training_goes_on_behind_an_uneven_validation():
    def on_rank(rank: int, port: int) -> list[float]:
        join_as_torchrun(rank, 2, port)
        torch.manual_seed(1)
        options = {"max_epochs": 2, "use_distributed_sampler": False}
        trainer = make_trainer(ZeROStrategy(stage=3), 2, **options)
        module = Classifier()
        trainer.fit(module, loader(4), loader(2 + rank))
        return [float(value.sum()) for value in module.state_dict().values()]

    first, second = run_ranks(on_rank, 2, free_port(), group=False, timeout=50.0)
    assert first == second


@pytest.mark.slow
def test_deepspeed_refuses_in_words():
    pytest.importorskip("deepspeed")
    with pytest.raises(Exception, match=r'or use ZeROStrategy\(stage=3, engine="fsdp2"\), whose ranks may differ'):
        predicted(lambda: ZeROStrategy(stage=3, engine="deepspeed"), 5, 2)
