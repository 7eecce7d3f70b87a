"""A rank skipped a branch and all waited for ever (20138: layers that some batches do not use)."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, Classifier
from tests.trainer.pipelines import LOSS
from tests.trainer.zeros import Fit, on_ranks, others, zero


class Branches(Classifier):
    """Rank `batch_idx % 2` goes a longer way."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.longer = self.global_rank == batch_idx % 2
        return self.loss(batch)

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return self.extra(x) if self.trainer.training and self.longer else x


class Both(Branches):
    """What it is in one process: the mean of both ways, which ranks go with the same rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for self.longer in (True, False):
            losses.append(self.loss(batch))
        return sum(losses) / 2


OWN = pytest.param([zero(1), zero(2)], id="own")
OPTIONS = {"max_epochs": 1, "use_distributed_sampler": False}


@pytest.mark.parametrize("strategies", [OWN, others("fsdp2", [2, 3]), others("deepspeed", [1, 2])])
def test_absent_gradients_count_as_zero(strategies: Any):
    jobs = [(Fit(kind, OPTIONS), make) for make in strategies for kind in (Branches, Both)]
    results = on_ranks(jobs, 2, timeout=140.0)
    for ours, reference in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(ours[0].weights, reference[0].weights, **LOSS)
        both = torch.stack([ours[0].losses, ours[1].losses]).mean(0)
        torch.testing.assert_close(both, reference[0].losses, **LOSS)


@pytest.mark.parametrize("strategies", [others("deepspeed", [3])])
def test_parameters_that_are_gathered_by_call_need_the_same_calls(strategies: Any):
    with pytest.raises(Exception, match=r"call different ones in a step. One rank is at the forward of `extra`"):
        on_ranks([(Fit(Branches, OPTIONS), strategies[0])], 2)


class Blocks(Branches):
    """The longer way is a list of blocks, each of which is gathered when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_blocks_that_one_rank_calls_end_in_words(stage: int):
    strategy = zero(stage, engine="fsdp2", blocks=["extra.0", "extra.1"])
    with pytest.raises(
        Exception, match=r"call different ones in a step\..* when another is at the forward of `extra\.0`"
    ):
        on_ranks([(Fit(Blocks, OPTIONS), strategy)], 2)
