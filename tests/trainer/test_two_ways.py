"""Schedules of two directions: replicas of every stage that stay equal, and the same training as one process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision, MulticlassRecall

from lightning_parallel.pipeline.gradients import buckets
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader, token_loader
from tests.trainer.pipelines import (
    Case,
    Record,
    assert_same,
    failure_of,
    join_as_torchrun,
    make_trainer,
    many_on_stages,
    one_process,
)
from tests.trainer.test_data_axis import Uneven, Unfinished, sent
from tests.trainer.test_metrics import FEW_ROWS, Collections, InHooks, Macro, Measured
from tests.trainer.test_parity import KEY_BIAS, gpt

NAMES = ("gems", "chimera", "chimera:doubling=true", "dualpipe")
BOTH = ("chimera", "dualpipe")


def assert_replicas_equal(records: Sequence[Record], at_least: int = 1) -> None:
    """Whatever several ranks hold is the same bits on all of them."""
    first = {}
    compared = 0
    for record in records:
        for name, value in record.own.items():
            compared += name in first
            assert torch.equal(first.setdefault(name, value), value), name
    assert compared >= at_least


def compare(case: Case, names: Sequence[str], num_ranks: int, **options: Any) -> None:
    """The case under every schedule on the same ranks, beside one process."""
    compare_all([(case, names)], num_ranks, **options)


def compare_all(pairs: Sequence[tuple[Case, Sequence[str]]], num_ranks: int, **options: Any) -> None:
    """Several cases, each under its schedules, on the same ranks."""
    cases = [(case, name) for case, names in pairs for name in names]
    found = many_on_stages([case.but({"schedule": name}) for case, name in cases], num_ranks, timeout=150.0)
    references = {id(case): one_process(case) for case, _ in pairs}
    for (case, name), records in zip(cases, found, strict=True):
        print(name)
        assert_same(records, references[id(case)], **options)
        assert_replicas_equal(records)


# -- what one process trains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, NAMES),
        pytest.param(4, ("dualpipe", "chimera:pairs=2", "chimera:doubling=true"), marks=pytest.mark.slow),
        pytest.param(4, ("gems", "chimera"), marks=pytest.mark.slow),
    ],
)
def test_parity_of_a_language_model_with_tied_weights(num_ranks: int, names: Sequence[str]):
    """Full batches, one that is too short for some schedules' rules, and one of a single row; clipped, accumulated."""
    make = lambda: gpt(num_blocks=2 * num_ranks)  # noqa: E731
    loader = lambda: token_loader(((8, 8), (8, 8), (3, 8), (1, 8)))  # noqa: E731
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 1}
    compare(Case(make, loader, {"num_microbatches": 8}, options), names, num_ranks, leave_out=KEY_BIAS)


def test_a_penalty_over_all_parameters_where_a_rank_holds_them_all():
    """Its gradients come with the last stage's backwards, before the sums of the earlier stages begin."""

    class Penalised(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + 0.1 * sum(p.square().sum() for p in self.parameters())

    compare(Case(Penalised, row_loader, {"num_microbatches": 8}), BOTH, 2)


def test_layers_that_are_frozen_unused_or_shared():
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "max_epochs": 1}
    compare(Case(Uneven, row_loader, {"num_microbatches": 4}, options, validate=False), BOTH, 2)


def test_sums_begin_while_the_last_b_or_w_runs(monkeypatch: pytest.MonkeyPatch):
    """Of a stage's four layers two leave when its last B has not come to the other two, and when the other stage has no
    gradient yet. Of that one (biases come with I) two leave before its last W has made the weights of the other two."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200)  # two layers
    options = {"callbacks": lambda: [Unfinished()], "max_steps": 2}
    schedule = Schedule.from_text("0F0 1F1r1 1B1r1 0I0 0W0 / 0F1r1 1F0 1B0 0I1r1 0W1r1")  # DualPipe's end
    strategy = {"schedule": schedule, "num_microbatches": None}
    (records,) = many_on_stages([Case(Classifier, row_loader, strategy, options, validate=False, at_end=sent)], 2)
    for record in records:
        assert list(dict.fromkeys(record.extra)) == [12, 8, 2, 0, -1]


def test_dropout_draws_what_one_direction_draws():
    """Masks belong to the micro-batch, so both schedules train alike, in validation and on the next epoch too."""
    make = lambda: gpt(dropout=0.3)  # noqa: E731
    case = Case(make, lambda: token_loader(((8, 8), (8, 12), (5, 8))), {"num_microbatches": 4}, {"max_epochs": 2})
    one_way, *others = many_on_stages([case.but({"schedule": name}) for name in ("1f1b", *BOTH)], 2, timeout=100.0)
    for records in others:
        assert_same(records, one_way[0], leave_out=KEY_BIAS)
        assert_replicas_equal(records)


class Everything(Measured):
    """Metrics whose order counts, collections, values logged in every way, and extras in what the step returns."""

    def make(self) -> None:
        self.seen, self.auroc = CatMetric(), MulticlassAUROC(CLASSES)
        names = ("train_acc", "train_mean", "val_acc", "val_mean")
        self.each = nn.ModuleDict({n: MulticlassAccuracy(CLASSES) if "acc" in n else MeanMetric() for n in names})
        both = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)])
        self.train_metrics, self.val_metrics = both.clone(prefix="train_"), both.clone(prefix="val_")

    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        both = self.train_metrics if kind == "train" else self.val_metrics
        both.update(logits, y)
        self.log_dict(both)
        self.each[f"{kind}_acc"](logits, y)
        self.each[f"{kind}_mean"](loss)
        self.log(f"{kind}_acc", self.each[f"{kind}_acc"], on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{kind}_mean", self.each[f"{kind}_mean"], on_step=kind == "train", on_epoch=True)
        self.log(f"{kind}_largest", logits.max(), reduce_fx="max")
        self.log(f"{kind}_rows", float(len(y)), reduce_fx="sum", batch_size=len(y))
        if kind == "val":
            self.seen.update(y.float())
            self.auroc.update(logits.softmax(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step("train", batch), "rows": batch[1], "count": torch.tensor(len(batch[1]))}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.is_global_zero:
            assert torch.equal(outputs["rows"], batch[1])
            assert outputs["count"] == len(batch[1])

    def on_validation_epoch_end(self) -> None:
        seen = self.seen.compute()
        self.log("order", (seen * torch.arange(1.0, 1.0 + len(seen))).sum())
        self.log("auroc", self.auroc.compute())
        self.seen.reset()
        self.auroc.reset()


@pytest.mark.filterwarnings(FEW_ROWS)
def test_metrics_and_logging_are_those_of_one_process():
    """Every metric sees every micro-batch of both directions, in their order."""
    loader = lambda: row_loader((8, 8, 5, 1))  # noqa: E731
    makers = (Everything, InHooks, Macro, Collections)
    cases = [Case(make, loader, {"num_microbatches": 4}, {"max_epochs": 2}) for make in makers]
    compare_all([(case, BOTH if case.make is Everything else BOTH[:1]) for case in cases], 2)


@pytest.mark.filterwarnings(FEW_ROWS)
def test_metrics_of_four_replicas():
    case = Case(Everything, lambda: row_loader((8, 5, 1)), {"num_microbatches": 8}, {"max_epochs": 1})
    compare(case, ("chimera:pairs=2",), 4)


class Predicts(Measured):
    """What it predicts: rows in a dict, a list with an entry a row, and a number a batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "names": [f"row {i}" for i in batch[1].tolist()], "largest": logits.mean()}


def test_every_row_is_predicted_once_and_in_order():
    def run(rank: int, num_ranks: int, port: int) -> Any:
        if num_ranks > 1:
            join_as_torchrun(rank, num_ranks, port)
        torch.manual_seed(1)
        module, loader = Predicts(), row_loader((8, 5, 1))
        strategy = "auto" if num_ranks == 1 else PipelineStrategy("chimera", num_microbatches=4)
        trainer = make_trainer(strategy, num_ranks)
        return trainer.predict(module, loader), trainer.validate(module, loader, verbose=False)

    expected, checked = run(0, 1, 0)
    for num_ranks in (2, 4):
        (predicted, found), *others = run_ranks(run, num_ranks, num_ranks, free_port(), group=False)
        for ours, theirs in zip(predicted, expected, strict=True):
            torch.testing.assert_close(ours["logits"], theirs["logits"])
            assert ours["names"] == theirs["names"]
        assert found == [pytest.approx(checked[0])] and all(other[1] == found for other in others)


@pytest.mark.parametrize(("copies", "names"), [(2, NAMES), pytest.param(3, ("chimera",), marks=pytest.mark.slow)])
def test_copies_side_by_side(copies: int, names: Sequence[str]):
    """Copies of a pipeline of two directions, whose replicas stay equal, over the copies too."""
    options = {"num_microbatches": 4, "data_parallel_size": copies}
    trainer = {"gradient_clip_val": 0.5, "max_epochs": 1, "accumulate_grad_batches": 2 if copies == 2 else 1}
    case = Case(Classifier, lambda: row_loader((8,) * 6), options, trainer)
    cases = [case.but({"schedule": name}) for name in ("1f1b", *names)]
    one_way, *others = many_on_stages(cases, 2 * copies, timeout=100.0)
    for two_ways in others:
        assert_same(two_ways[:2], one_way[0])
        for ours, theirs in zip(two_ways, one_way, strict=True):  # each copy has rows of its own
            torch.testing.assert_close(torch.stack(ours.losses), torch.stack(theirs.losses))
        assert_replicas_equal(two_ways)


def test_any_schedule_object():
    text = "0F0 0F1 1F2r1 1F3r1 1I2r1 1B3r1 0B0 1W2r1 0B1 / 1F0 1F1 0F2r1 0F3r1 1B0 1B1 0B2r1 0B3r1"
    schedule = Schedule.from_text(text)
    by_hand = Case(gpt, token_loader, {"num_microbatches": None}, {"gradient_clip_val": 0.5})
    compare(by_hand, (schedule,), 2, leave_out=KEY_BIAS)  # type: ignore[arg-type]


def test_checkpoints_are_those_of_one_process(tmp_path: Any):
    """One process resumes from a run of two directions, and the other way round; in one file or in parts."""

    def save(trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(tmp_path / str(trainer.world_size))

    def case(**options: Any) -> Case:
        return Case(
            lambda: gpt(learning_rate=1e-2), token_loader, {"schedule": "dualpipe"}, {"max_epochs": 1}, **options
        )

    first, [records] = one_process(case(after=save)), many_on_stages([case(after=save)], 2)
    assert_same(records, first, leave_out=KEY_BIAS)
    resumed = {"trainer": {"max_epochs": 2}}
    straight = one_process(case().but(**resumed))
    for path, name in ((tmp_path / "1", "full"), (tmp_path / "2", "sharded")):
        again = case(checkpoint=path).but({"state_dict_type": name}, **resumed)
        found, [ours] = one_process(again), many_on_stages([again], 2)
        parts = {key: value for record in ours for key, value in record.weights.items()}
        for weights in (found.weights, parts):
            assert weights.keys() == straight.weights.keys()
            for key, value in straight.weights.items():
                if "qkv.bias" not in key:
                    torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)
        assert_replicas_equal(ours)


# -- buffers -----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A block with a BatchNorm of two channels, which has three values a channel even in a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).view(len(x), 2, WIDTH // 2)).flatten(1)


def normed() -> Classifier:
    return Classifier(nn.Sequential(*(Normed() for _ in range(4))))


def test_running_statistics_are_those_of_the_whole_batch():
    """Also where a batch has micro-batches for one direction only: they equal those of one direction, on every rank.

    With two rows in every micro-batch, six values a channel, BatchNorm would divide rounding by a small spread.
    """
    loader = lambda: row_loader((16, 16, 2, 1))  # noqa: E731
    case = Case(normed, loader, {"num_microbatches": 4, "check_loss": False}, {"max_epochs": 2})
    one_way, *others = many_on_stages([case.but({"schedule": name}) for name in ("1f1b", *BOTH)], 2, timeout=100.0)
    assert any("running_mean" in name for name in one_way[0].weights)
    for records in others:
        assert_same(records, one_way[0])


class Counts(nn.Linear):
    """Writes into a buffer in every forward."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def counting(persistent: bool) -> Classifier:
    return Classifier(nn.Sequential(Counts(persistent), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))))


# -- what is refused, and what is found --------------------------------------------------------------------------------


class Changed(Callback):
    """Changes a weight on one rank after a step, as a hook that draws its own random numbers would."""

    def __init__(self, name: str, after: int, rank: int) -> None:
        self.name, self.after, self.rank = name, after, rank

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, i: int) -> None:
        if i == self.after and trainer.global_rank == self.rank:
            with torch.no_grad():
                module.get_parameter(self.name).view(-1)[0].mul_(1.0001)


@pytest.mark.parametrize(
    ("num_ranks", "name", "after", "told", "when"),
    [
        (2, "net.0.weight", 0, (0, 0, 1), "before training batch 1 of epoch 0"),
        (4, "net.6.bias", 2, (1, 1, 2), "at the end of training"),
    ],
)
def test_a_replica_that_was_changed_is_found(num_ranks: int, name: str, after: int, told: Any, when: str):
    stage, changed, other = told
    options = {"callbacks": lambda: [Changed(name, after, num_ranks // 2 - 1)], "max_steps": 3}
    case = Case(Classifier, row_loader, {"schedule": "chimera"}, options, validate=False)
    assert failure_of(case, num_ranks).startswith(
        f"Parameter `{name}` of stage {stage} is no longer the same on all ranks that hold a replica of it: rank"
        f" {changed} unlike rank {other}, found {when}. Something changed it on one rank only."
    )


def returns_what_does_not_pickle(self: Any, batch: Any, batch_idx: int) -> Any:
    return {"loss": self.loss(batch), "later": lambda: None}


class ResetsInTheStep(Measured):
    def measure(self, kind: str, logits: Tensor, y: Tensor, loss: Tensor) -> None:
        self.acc.reset()
        self.acc(logits, y)


def with_step(step: Callable[..., Any]) -> Callable[[], Classifier]:
    return lambda: type("Module", (Classifier,), {"training_step": step})()


REFUSED = [
    (lambda: counting(True), {}, "A step writes into buffer `net.0.calls`, which each replica of a stage would do for"),
    (with_step(returns_what_does_not_pickle), {}, "A value that another rank needs cannot be sent to it: "),
    (ResetsInTheStep, {}, "The step resets metric `acc`, which with a schedule of two directions would forget some"),
    (lambda: Collects(), {}, "training_step fills `self.losses`, which with a schedule of two directions holds one"),
    (
        lambda: Classifier(nn.Sequential(*(Broken() for _ in range(4)))),
        {"check_loss": False},
        "stage 0 (rank 0) failed in the forward of micro-batch 1 on replica 1\n",
    ),
    (
        with_step(lambda self, batch, batch_idx: self.loss(batch) * len(batch[0])),
        {},
        "The loss of the whole batch is",
    ),
]


class Collects(Classifier):
    def on_train_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses.append(self.loss(batch))
        return self.losses[-1]


class Broken(nn.Linear):
    """Fails on the second micro-batch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().flatten()[0]) == float(row_loader().dataset[0][0][2, 0]):
            raise ValueError("label 7 is out of range")
        return super().forward(x)


@pytest.mark.parametrize(("make", "strategy", "text"), REFUSED, ids=lambda value: "")
def test_what_is_refused_in_words(make: Callable[[], LightningModule], strategy: Any, text: str):
    case = Case(make, row_loader, {"schedule": "gems", **strategy}, validate=False)
    assert text in failure_of(case, whole="failed in" in text)


def test_a_cache_in_a_buffer_is_let_be():
    case = Case(lambda: counting(False), row_loader, {}, validate=False)
    compare(case, ("gems",), 2)
