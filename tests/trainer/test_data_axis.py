"""Copies of a pipeline side by side are one process that sees all their rows: gradients, weights, logged means."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.checkpoint.sharded import consolidate
from lightning_parallel.pipeline.gradients import buckets
from lightning_parallel.strategies import HybridStrategy, PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, Classifier, chain, row_dataset, row_loader
from tests.trainer.pipelines import (
    Case,
    Record,
    all_metrics,
    assert_same_optimizer,
    fit,
    join_as_torchrun,
    make_trainer,
    one_process,
)

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers a bucket, so that there are several."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200)


class Sent(Callback):
    """Notes how many buckets are on their way to the other copies when a step's actions are over."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.counts.append(trainer.strategy.pipeline.sums.num_sent)


def sent(trainer: Trainer, module: LightningModule) -> list[int]:
    """What `Sent` noted."""
    return next(callback.counts for callback in trainer.callbacks if isinstance(callback, Sent))


class Averaged(Classifier):
    """Logs means over all copies, and the accuracy on everything that was seen."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__(network)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("val_accuracy", self.accuracy)


class Conditional(Averaged):
    """One row of the whole data takes another branch: only one copy makes a gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x)
        return self.branch(logits) if bool((x[:, 0] > 1.5).any()) else logits


class Twice(Averaged):
    """Calls the model on two views of its rows."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss((-batch[0], batch[1]))


class TwiceOnOneCopy(Averaged):
    """Rows of the second copy, the odd ones, have a second view: the first copy's steps call the model once."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss, has_view = super().loss(batch), x[:, 0] > 50.0
        if not bool(has_view.any()):
            return loss
        view = F.cross_entropy(self(-x / 100.0), y, reduction="none")
        return loss + (view * has_view).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def on_copies(case: Case, copies: int, stages: int) -> list[Record]:
    """The run on so many copies of so many stages; one record a rank."""

    def run(rank: int, port: int) -> Record:
        join_as_torchrun(rank, copies * stages, port)
        options = {"num_microbatches": 4, "data_parallel_size": copies, **case.strategy}
        return fit(case, PipelineStrategy(**options), copies * stages)

    return run_ranks(run, copies * stages, free_port(), group=False, timeout=50.0)


def assert_all_rows(case: Case, reference: Record, records: Sequence[Record]) -> None:
    first = records[0]
    for name, value in reference.weights.items():
        torch.testing.assert_close(first.weights[name], value, **CLOSE)
    for ours, theirs in zip(first.optimizers, reference.optimizers, strict=True):
        assert_same_optimizer(ours, theirs, CLOSE)
    for record in records:
        for ours, theirs in zip(record.metrics, reference.metrics, strict=True):
            for key, value in theirs.items():
                torch.testing.assert_close(ours[key], value, check_dtype=False, **CLOSE)
        for name, value in record.own.items():
            torch.testing.assert_close(value, reference.weights[name], **CLOSE)


def loader(batch_size: int, copies: int = 2) -> DataLoader:
    """All rows in one process; in a run of copies this copy's share, in order (Lightning's own sampler shuffles)."""
    dataset = row_dataset(48, batch_size).dataset
    if "RANK" not in os.environ:
        return DataLoader(dataset, batch_size)
    copy = int(os.environ["RANK"]) * copies // int(os.environ["WORLD_SIZE"])
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, copies, copy, shuffle=False))


class Uneven(Averaged):
    """The second layer does not train, the third is used by no row, and the fourth and sixth are one."""

    def __init__(self) -> None:
        super().__init__(chain(8))
        self.net[2].requires_grad_(False)
        self.net[10].weight = self.net[6].weight

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.net):
            x = layer(x) if i != 4 else x + 0.0 * layer.bias.detach()
        return x


def case(make: Any, strategy: Any, epochs: int = 1, **trainer: Any) -> Case:
    options = {"max_epochs": epochs, "callbacks": lambda: [Sent()] if "RANK" in os.environ else [], **trainer}
    return Case(
        make, lambda: loader(4), strategy, options, at_end=lambda *run: sent(*run) if "RANK" in os.environ else 0
    )


def marked() -> DataLoader:
    """Every second row is one with a second view."""
    made = loader(4 if "RANK" in os.environ else 8)
    x = made.dataset.tensors[0]
    x[:, 0] = torch.where(torch.arange(len(x)) % 2 > 0, 100.0, 0.0)
    return made


# The buckets that leave before a step ends, on ranks 0 and 1 of a copy, step by step: none in the first, which might
# begin anew on one copy alone if it called the model several times. A weight that two stages
# share is a bucket of its own.
CASES = {
    "plain": (case(Averaged, {}, 2), ([0] + [2] * 11, [0] + [2] * 11)),
    "accumulated": (case(Averaged, {}, 2, accumulate_grad_batches=2), ([0, 2] * 6, [0, 2] * 6)),
    "clipped": (case(Averaged, {}, 2, gradient_clip_val=0.05), ([0] + [2] * 11, [0] + [2] * 11)),
    "called twice": (case(Twice, {}), ([0] + [2] * 5, [0] + [2] * 5)),
    "gpipe": (case(Averaged, {"schedule": "gpipe", "num_microbatches": 2}), ([0] + [2] * 5, [0] + [2] * 5)),
    "zb_h1": (case(Uneven, {"schedule": "zb_h1"}, accumulate_grad_batches=4), ([0, 0, 0, 3, 0, 3], [0, 0, 0, 3, 0, 3])),
    "zb_v": (case(Uneven, {"schedule": "zb_v"}), ([0] + [2] * 5, [0] + [3] * 5)),
    "interleaved_1f1b": (case(Averaged, {"schedule": "interleaved_1f1b"}), ([0] + [2] * 5, [0] + [2] * 5)),
}


VARIANTS = {"plain", "clipped", "gpipe", "zb_h1", "zb_v", "interleaved_1f1b"}  # of cases that stay


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in CASES]
)
def test_two_copies_of_two_stages_are_one_process_with_all_rows(name):
    case, sent_early = CASES[name]
    records = on_copies(case, 2, 2)
    assert_all_rows(case, one_process(case.but(loader=lambda: loader(8))), records)
    for first, second in zip(records[:2], records[2:], strict=True):
        assert all(torch.equal(value, second.own[key]) for key, value in first.own.items())
    assert [record.extra for record in records] == [*sent_early, *sent_early]


def test_one_copy_calls_the_model_twice_and_the_other_does_not():
    twice = case(TwiceOnOneCopy, {}).but(loader=marked, validate=False)
    records = on_copies(twice, 2, 2)
    assert_all_rows(twice, one_process(twice), records)
    assert [record.extra for record in records] == [[0] + [2] * 5] * 4


class Unfinished(Sent):
    """Notes whenever a bucket leaves how many of this rank's parameters have no gradient yet, in the last step."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        begin, own = dist.all_reduce, trainer.strategy.pipeline.own

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("async_op"):
                self.counts.append(sum(parameter.grad is None for _, parameter in own))
            return begin(*args, **kwargs)

        dist.all_reduce = all_reduce  # this process ends with the run

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.clear()

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.counts.append(-1)  # the step's actions are over


@pytest.mark.parametrize(("schedule", "unfinished"), [("1f1b", [4, 0, -1]), ("zb_h1", [2, 0, -1])])
def test_a_bucket_leaves_before_the_last_backward_or_w_of_its_stage_has_ended(schedule: str, unfinished: list[int]):
    """Of four layers, two are on their way when the other two have no gradient, or (biases come with I) no weight's."""
    strategy = {"schedule": schedule, "num_microbatches": 1}
    once = case(Averaged, strategy, limit_train_batches=2, callbacks=lambda: [Unfinished()])
    assert [record.extra for record in on_copies(once.but(validate=False), 2, 2)] == [unfinished] * 4


class Tied(Averaged):
    """A layer of the first stage and one of the last share their weight, among others of other sizes."""

    def __init__(self) -> None:
        super().__init__(chain(8))
        self.net[12].weight = self.net[0].weight


@pytest.mark.parametrize(
    ("make", "strategy", "unfinished"),
    [
        (Tied, {"schedule": "1f1b", "num_microbatches": 1}, [[2, 0, -1], [4, 1, 0, -1]]),
        (Averaged, {"schedule": "chimera", "num_microbatches": 2}, [[12, 8, 4, 0, -1]] * 2),
    ],
)
def test_what_several_ranks_of_a_copy_hold_leaves_as_soon_as_it_is_made(make: Any, strategy: Any, unfinished: Any):
    """A tied weight behind all that its stages have alone, the first stage's when its own weight is still to come. Of
    both stages of two directions two layers each, while their last backward is to make the other two."""
    once = case(make, strategy, limit_train_batches=2, callbacks=lambda: [Unfinished()])
    records = on_copies(once.but(validate=False), 2, 2)
    assert [list(dict.fromkeys(record.extra)) for record in records] == unfinished * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_tied_weight_over_two_copies_is_one_processs(accumulate: int):
    """Its sum is over both stages and both copies at once; what accumulated counts once."""
    run = case(Tied, {}, 2, accumulate_grad_batches=accumulate, gradient_clip_val=0.05)
    records = on_copies(run, 2, 2)
    assert_all_rows(run, one_process(run.but(loader=lambda: loader(8))), records)
    held = [record.own["net.0.weight"] for record in records]
    assert len(held) == 4 and all(torch.equal(weight, held[0]) for weight in held)


def test_a_weight_that_two_stages_share_stays_one_over_three_copies():
    """Three summands round by their order, and the stages' buckets differ: the shared gradient is made equal again."""
    case = Case(Tied, lambda: loader(4, copies=3), trainer={"max_epochs": 2})
    records = on_copies(case, 3, 2)
    assert_all_rows(case, one_process(case.but(loader=lambda: loader(12))), records)
    held = [record.own["net.0.weight"] for record in records]
    assert len(held) == 6 and all(torch.equal(weight, held[0]) for weight in held)


def test_four_copies_of_one_stage():
    case = Case(Averaged, lambda: loader(2, copies=4), {"num_microbatches": 2}, {"max_epochs": 1})
    assert_all_rows(case, one_process(case.but(loader=lambda: loader(8))), on_copies(case, 4, 1))


def test_a_parameter_that_only_one_copy_uses():
    case = Case(Conditional, lambda: loader(2), {"num_microbatches": 1}, {"max_epochs": 2}, validate=False)
    records = on_copies(case, 2, 1)
    x = row_dataset(48, 48).dataset.tensors[0]
    assert 0 < int((x[:, 0] > 1.5).sum()) < 6, "a row takes the branch"
    for name, value in records[0].weights.items():
        assert torch.equal(value, records[1].own[name])


class Seen(Classifier):
    """Remembers the rows of an epoch, and begins with values of its own on every rank."""

    def __init__(self) -> None:
        super().__init__(chain(4, lambda: nn.Dropout(0.5)))
        torch.nn.init.normal_(self.net[0].weight, generator=torch.Generator().manual_seed(id(self) % 1000))
        self.rows: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows.append(batch[0][:, 0].detach())
        return super().training_step(batch, batch_idx)


def test_shuffled_rows_are_dealt_once_and_copies_begin_alike_and_drop_differently():
    case = Case(
        Seen,
        lambda: row_dataset(48, 4, shuffle=True),
        trainer={"max_epochs": 1},
        validate=False,
        at_end=lambda trainer, module: torch.cat(module.rows),
    )
    first, _, second, _ = on_copies(case, 2, 2)
    dealt = torch.cat([first.extra, second.extra]).sort().values
    assert torch.equal(dealt, row_dataset(48, 48).dataset.tensors[0][:, 0].sort().values)
    for name in first.own:
        assert torch.equal(first.own[name], second.own[name])
    assert first.losses != second.losses


def test_sizes_that_do_not_multiply_are_refused():
    def run(rank: int, port: int) -> None:
        join_as_torchrun(rank, 3, port)
        fit(Case(Classifier, lambda: loader(4)), PipelineStrategy(data_parallel_size=2), 3)

    with pytest.raises(ValueError, match=r"The mesh data 2 x pipeline 1 has 2 ranks, but 3 processes were started"):
        run_ranks(run, 3, free_port(), group=False, timeout=50.0)


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("at_end", "full"),
        ("after", "sharded"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("at_end", "sharded"), ("after", "full"))),
    ],
)
def test_a_checkpoint_of_copies_is_one_processs(tmp_path, kind: str, moment: str):
    path, file = tmp_path / "copies.ckpt", tmp_path / "whole.ckpt"
    save = {moment: lambda trainer, module: trainer.save_checkpoint(path)}
    on_copies(Case(Averaged, lambda: loader(4), {"state_dict_type": kind}, {"max_epochs": 1}, **save), 2, 2)
    if kind == "sharded":
        consolidate(path, file, weights_only=False)
    longer = Case(Averaged, lambda: loader(8), trainer={"max_epochs": 2})
    whole, resumed = one_process(longer), one_process(longer.but(checkpoint=file if kind == "sharded" else path))
    for name, value in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, **CLOSE)


def test_the_step_of_every_rank_logs_the_same_mean():
    case = Case(
        Averaged, lambda: loader(4), trainer={"max_epochs": 1}, after=lambda trainer, module: all_metrics(trainer)
    )
    records = on_copies(case, 2, 2)
    for record in records[1:]:
        assert record.extra.keys() == records[0].extra.keys()
        for key, value in record.extra.items():
            torch.testing.assert_close(value, records[0].extra[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PipelineStrategy(data_parallel_size=2, num_microbatches=1, start_method="fork"),
        pytest.param(
            lambda: HybridStrategy(data_parallel_size=2, zero_stage=3, start_method="fork"), marks=pytest.mark.slow
        ),
    ],
    ids=["copies", "stage 3"],
)
def test_averaged_weights_come_back_from_forked_copies(make):
    """Ranks tell their callback's copy of the model together, while they are still connected."""

    def averaged(strategy: Any, devices: int) -> Classifier:
        torch.manual_seed(1)
        module = Classifier()
        averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
        options = {"max_epochs": 3, "use_distributed_sampler": False, "limit_val_batches": 0}
        make_trainer(strategy, devices, [averaging], **options).fit(module, row_loader(), row_loader((8,)))
        return module

    ours, theirs = averaged(make(), 2), averaged("auto", 1)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, **CLOSE)
