"""The loss check tells a mean over rows from every other loss, and leaves no trace."""

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.batch import microbatch
from lightning_parallel.pipeline.batch.fields import Cutting
from lightning_parallel.pipeline.parity.loss_check import LossCheck, StepReport
from lightning_parallel.pipeline.parity.stage_check import Fields, Rounding, StageCheck
from lightning_parallel.pipeline.partition.layout import lay_out
from lightning_parallel.pipeline.runtime.stage_executor import StageExecutor
from lightning_parallel.pipeline.runtime.work import StepWork
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.stage.random_streams import RandomStreams
from lightning_parallel.pipeline.stage.rounds import Rounds

SIZES = [2, 2, 1]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Four layers; one stage, so that nothing has to be received."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
        self.seen: list[int] = []
        self.total = torch.zeros(())
        self.count = 0


def check(
    loss: Callable[[Model, Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32, weights: list | None = None
) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    cpu = torch.device("cpu")
    cut = CutModel(model, lay_out(model, 1), cpu, RandomStreams(0, cpu))
    batch = (torch.randn(5, 3).to(dtype), torch.randint(3, (5,)))
    parts = microbatch.split(batch, SIZES)
    steps = [lambda part=part: loss(model, *part) for part in parts]
    weights = weights or [size / 5 for size in SIZES]
    rounding = Rounding.of(model, cpu, autocast=False)
    judge = LossCheck(rounding, SIZES, weights, lambda output: StepReport(output.detach().double(), {}))
    executor, alone = StageExecutor(cut, 0, None, None), lambda value: [value]
    rounds = Rounds(cut, {(0, 0): executor}, alone, lambda error, action: error)
    work = StepWork(Schedule.from_text("0F0 0F1 0F2"), steps, [0, 0, 1], 0)
    try:
        checks = StageCheck(rounds, [executor], alone, judge, rounding)
        assert checks.compare(
            work, lambda: loss(model, *batch), SIZES, Fields(Cutting(), 5, lambda name, change: ([], mean))
        )
    finally:
        cut.release()
    return model


def mean(model: Model, x: Tensor, y: Tensor) -> Tensor:
    model.seen.append(len(x))
    model.total += 1
    model.count += 1
    return F.cross_entropy(model.net(x), y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_over_rows_passes_and_nothing_has_changed(dtype: torch.dtype):
    model = check(mean, dtype)
    assert model.seen == [] and model.total == 0 and model.count == 0
    assert model.training and all(module.training for module in model.modules())
    assert model.net[1].num_batches_tracked == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x, y: F.cross_entropy(model.net(x), y, reduction="sum"),
        lambda model, x, y: F.cross_entropy(model.net(x), y.masked_fill(y == 1, -100), ignore_index=-100),
        lambda model, x, y: torch.cdist(h := model.net(x), h).logsumexp(-1).mean(),
        lambda model, x, y: model.net(x).square().mean().sqrt(),
    ],
    ids=["sum", "ignored labels", "contrastive", "root of a mean"],
)
def test_other_losses_are_refused(loss):
    message = (
        r"The loss of the whole batch is .*, but its 3 micro-batches of \[2, 2, 1\] rows, weighted by rows, give .*\."
        r" The loss is not a mean over rows\. Give PipelineStrategy\(loss_weight=lambda batch: number_of_terms"
    )
    with pytest.raises(ValueError, match=message):
        check(loss)


def test_the_right_weights_pass():
    weights = [1.0, 1.0, 1.0]
    check(lambda model, x, y: F.cross_entropy(model.net(x), y, reduction="sum"), weights=weights)


def test_random_numbers_of_torch_are_held_still():
    check(lambda model, x, y: mean(model, x + torch.randn_like(x), y))
    with pytest.raises(ValueError, match="is not a mean over rows"):
        check(lambda model, x, y: mean(model, x + torch.randn_like(x), y) * len(x))


def test_a_step_with_random_numbers_of_others_cannot_be_compared():
    def noisy(model: Model, x: Tensor, y: Tensor) -> Tensor:
        return mean(model, x + torch.from_numpy(numpy.random.randn(*x.shape)).to(x.dtype), y)

    with pytest.raises(ValueError, match=r"could not be compared with the whole batch: the step draws random numbers"):
        check(noisy)


def test_a_step_that_fails_on_the_joined_batch_cannot_be_compared():
    def only_small(model: Model, x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 2:
            raise IndexError("too many rows")
        return mean(model, x, y)

    message = r"the step fails on one of them \(IndexError: too many rows\)\. .* check_loss=False then skips"
    with pytest.raises(ValueError, match=message):
        check(only_small)
