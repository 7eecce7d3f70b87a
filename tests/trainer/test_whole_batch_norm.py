"""Batch norms by the statistics of the whole batch, in pipelines and over copies, are one process's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies import HybridStrategy, PipelineStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import (
    Case,
    Record,
    assert_parity,
    failure_of,
    fit,
    join_as_torchrun,
    on_stages,
    one_process,
)

BATCH = {"batch_norm": "batch", "schedule": "gpipe"}
FOUR = {"max_steps": 4, "precision": "64-true", "val_check_interval": 2}  # norms divide rounding by spreads
SIZES = (8, 8, 8, 8)
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class Tabular(Classifier):
    """Norms of every kind, one of them frozen, and dropout that draws nothing."""

    def __init__(self) -> None:
        kinds: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"momentum": 0.3}]
        layers: list[nn.Module] = []
        for options in kinds:
            layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options), nn.ReLU()]
        super().__init__(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))

    def on_train_epoch_start(self) -> None:
        self.net[10].eval()


class Untracked(Classifier):
    """Norms that look at the batch in evaluations, too."""

    def __init__(self) -> None:
        norm = lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)  # noqa: E731
        super().__init__(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), norm(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, CLASSES)
            )
        )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm_one(self.one(x)), inplace=True)
        return F.relu(x + self.norm_two(self.two(h)))


class SmallResNet(Classifier):
    block: type[Residual] = Residual

    def __init__(self) -> None:
        super().__init__(nn.Sequential())
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks, self.head = nn.ModuleList(self.block(4) for _ in range(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x[:, None, None].expand(-1, -1, 4, -1) ** 2))
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))


def case(make: Callable[[], Classifier], **strategy: Any) -> Case:
    return Case(make, lambda: row_loader(SIZES), {**BATCH, **strategy}, FOUR)


def test_a_tabular_network_with_norms_is_one_process():
    assert_parity(case(Tabular), (2,), CLOSE, CLOSE)


def test_norms_without_running_statistics_are_one_process_in_evaluations_too():
    assert_parity(case(Untracked), (2,), CLOSE, CLOSE)


@pytest.mark.parametrize(
    "recompute", ["none", pytest.param("block", marks=pytest.mark.slow), pytest.param("stage", marks=pytest.mark.slow)]
)
def test_a_residual_network_is_one_process(recompute: str):
    assert_parity(case(SmallResNet, recompute=recompute), (2,), CLOSE, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_microbatches": 3}, {"num_microbatches": 1}, {"num_microbatches": 8}])
def test_micro_batches_of_any_size_and_one_stage(options: dict[str, Any]):
    assert_parity(case(Tabular, **options), (1, 2), CLOSE, CLOSE)


def test_split_backwards_whose_forwards_come_first():
    text = "0F0 0F1 0I0 0I1 0W0 0W1 / 1F0 1F1 1I0 1I1 1W0 1W1"
    assert_parity(case(Tabular, schedule=Schedule.from_text(text), num_microbatches=None), (2,), CLOSE, CLOSE)


class CheckpointedAround(SmallResNet):
    """A checkpoint of the step around each block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x[:, None, None].expand(-1, -1, 4, -1) ** 2))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h.mean((2, 3)))


class ResidualAgain(Residual):
    """Computes its inside again."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        whole = super().forward
        return checkpoint(whole, x, use_reentrant=self.reentrant) if self.training else whole(x)


class CheckpointedInside(SmallResNet):
    block = ResidualAgain


class ResidualReentrant(ResidualAgain):
    reentrant = True


class Reentrant(SmallResNet):
    block = ResidualReentrant


@pytest.mark.slow
def test_checkpoints_inside_of_blocks_are_one_process():
    run, plain = case(CheckpointedInside), case(SmallResNet)  # one process counts what it computes again
    for found in (on_stages(run, 2), on_stages(plain, 2)):
        torch.testing.assert_close(found[0].weights, one_process(plain).weights, **CLOSE)


@pytest.mark.parametrize(
    ("make", "words", "remedy"),
    [
        (CheckpointedAround, "A checkpoint around blocks computes them again", {"num_microbatches": 1}),
        (Reentrant, "computed again in a backward, by a checkpoint with use_reentrant=True", {"num_microbatches": 1}),
    ],
)
def test_checkpoints_that_cannot_be_followed_are_refused(make: Any, words: str, remedy: dict[str, Any]):
    assert words in failure_of(case(make))
    on_stages(case(make, **remedy), 2)


class Stashing(Tabular):
    """Puts something into an attribute before a norm and reads it behind."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[0](x)
        self.kept = h
        h = self.net[1](h) + self.kept
        return self.net[2:](h)


def test_what_waits_in_attributes_at_a_norm_is_refused():
    words = "The step leaves `self.kept` behind before a batch norm, where micro-batches wait"
    assert words in failure_of(case(Stashing), 1)
    assert_parity(case(Stashing, num_microbatches=1), (1,), CLOSE, CLOSE)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "chimera", "dualpipe"])
def test_schedules_that_run_backwards_early_are_refused(schedule: str):
    run = case(Tabular, schedule=schedule)
    text = failure_of(run)
    assert "normalises by the statistics of the whole batch" in text and 'Use schedule="gpipe"' in text


def test_1f1b_runs_norms_of_its_first_stage_alone():
    """Where there are no more micro-batches than stages its forwards come first."""

    class First(Classifier):
        def __init__(self) -> None:
            layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
            super().__init__(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)))

    run = case(First, schedule="1f1b", num_microbatches=2, partition=[3, 3])
    assert_parity(run, (2,), CLOSE, CLOSE)
    assert "runs the backward" in failure_of(run.but({"num_microbatches": 4}))
    assert_parity(run.but({"num_microbatches": 4, "schedule": "gpipe"}), (2,), CLOSE, CLOSE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_norm": "rows"}, 'batch_norm is "microbatch" or "batch"'),
        ({"batch_norm": "batch", "cuda_graphs": True}, 'batch_norm="batch"'),
        ({"batch_norm": "batch", "schedule": "terapipe"}, "batch_norm='microbatch'"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        PipelineStrategy(**options)


# -- over copies -------------------------------------------------------------------------------------------------------

COPIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "ZeRO": (2, lambda: ZeROStrategy(stage=2)),
    "ZeRO 3": (2, lambda: ZeROStrategy(stage=3)),
    "mesh": (2, lambda: HybridStrategy(data_parallel_size=2)),
    "mesh in micro-batches": (2, lambda: HybridStrategy(data_parallel_size=2, num_microbatches=2, **BATCH)),
    "mesh computed again": (2, lambda: HybridStrategy(data_parallel_size=2, recompute="block")),
    "copies of a pipeline": (4, lambda: PipelineStrategy(data_parallel_size=2, num_microbatches=2, **BATCH)),
}
SLOW = ("ZeRO 3", "mesh computed again", "copies of a pipeline")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in COPIES]
)
@pytest.mark.parametrize("make", [Tabular, pytest.param(SmallResNet, marks=pytest.mark.slow)])
def test_norms_synchronised_over_copies_are_one_process(name: str, make: Any):
    ranks, strategy = COPIES[name]
    run = Case(make, lambda: row_loader(SIZES), {}, {**FOUR, "sync_batchnorm": True})

    def on_rank(rank: int, port: int) -> Record:
        join_as_torchrun(rank, ranks, port)
        half = rank // (ranks // 2)

        def loader() -> DataLoader:
            batches = [tuple(x[4 * half : 4 * half + 4] for x in batch) for batch in row_loader(SIZES)]
            return DataLoader(batches, batch_size=None)

        return fit(run.but(loader=loader, trainer={"use_distributed_sampler": False}), strategy(), ranks)

    record, reference = run_ranks(on_rank, ranks, free_port(), group=False)[0], one_process(run)
    for name, value in reference.weights.items():
        torch.testing.assert_close(record.weights[name], value, **CLOSE)


def test_micro_batches_that_normalise_alone_are_not_synchronised():
    run = Case(Tabular, lambda: row_loader(SIZES), {}, {**FOUR, "sync_batchnorm": True})
    assert 'batch_norm="batch" and schedule="gpipe"' in failure_of(run, 1)
    assert_parity(run.but(BATCH), (1,), CLOSE, CLOSE)
