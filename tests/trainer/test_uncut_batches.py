"""What needs no cut is not asked to be cut, and what Lightning's own users do with one stage, or outside of a run."""

import copy
import inspect
import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Timer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_parallel import HybridStrategy, PipelineStrategy, TensorParallelStrategy, ZeROStrategy
from tests.harness import free_port, rank_outcomes, run_ranks
from tests.trainer.modules import Classifier, chain, row_dataset, row_loader, rows
from tests.trainer.pipelines import Case, assert_parity, failure_of, join_as_torchrun, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`"),
]


class Graph:
    """A batch of no kind that can be cut."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class OnObjects(Classifier):
    """Batches are objects, numbers or nothing at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.x if isinstance(batch, Graph) else torch.full((2, 6), float(batch or 0))
        return self.net(x).pow(2).mean()

    validation_step = test_step = training_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch.x)


def objects() -> DataLoader:
    return DataLoader([Graph(x) for x, _ in rows()], batch_size=None)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: PipelineStrategy(num_microbatches=1), lambda: PipelineStrategy(num_microbatches=4), HybridStrategy,
        TensorParallelStrategy,
    ],
    ids=["one micro-batch", "one stage", "hybrid", "tensor"],
)  # fmt: skip
def test_batches_that_are_not_cut_may_be_anything(strategy):
    torch.manual_seed(0)
    module = OnObjects()
    plain = copy.deepcopy(module)
    trainer = make_trainer(strategy(), 1)
    trainer.fit(module, objects(), objects())
    trainer.test(module, DataLoader([1, 2.0], batch_size=None), verbose=False)
    assert len(trainer.predict(module, objects())) == 3
    make_trainer("auto", 1).fit(plain, objects(), objects())
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_two_stages_run_objects_uncut():
    assert_parity(Case(OnObjects, objects, {"num_microbatches": 1}, validate=False), stages=(2,))


def test_two_stages_that_would_cut_objects_say_what_to_do():
    text = failure_of(Case(OnObjects, objects, {"num_microbatches": 2}, validate=False))
    assert "cannot count its rows" in text and "num_microbatches=1" in text


class Iterates(Classifier):
    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_validation_step_that_takes_an_iterator_is_refused_in_words():
    trainer = make_trainer(PipelineStrategy(num_microbatches=1), 1)
    with pytest.raises(
        ValueError, match=r"cannot run validation_step\(dataloader_iter\)\. Write validation_step\(self"
    ):
        trainer.validate(Iterates(), row_loader())


def test_a_validation_step_may_be_none():
    module = Classifier()
    module.validation_step = None  # type: ignore[assignment, method-assign]
    make_trainer(PipelineStrategy(num_microbatches=1), 1).fit(module, row_loader())


class Trained(LightningModule):
    """Logs in validation what it is trained on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Bare(Trained):
    """Parameters of its own, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.weight).pow(2).mean()


class ListOfParameters(Bare):
    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(6))])

    @property
    def weight(self) -> Tensor:
        return self.weights[0]


class Functional(Bare):
    """Nothing to train but a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.act(batch[0] * self.weight).mean()


@pytest.mark.parametrize("make", [Bare, ListOfParameters, Functional])
def test_one_stage_needs_no_blocks(make):
    module, plain = make(), make()
    make_trainer(PipelineStrategy(num_microbatches=2), 1).fit(module, row_loader())
    make_trainer("auto", 1).fit(plain, row_loader())
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "strategy", [lambda: PipelineStrategy(num_microbatches=1), HybridStrategy, lambda: ZeROStrategy(stage=2)]
)
def test_collectives_outside_of_a_run_give_the_value_back(strategy):
    trainer, module = make_trainer(strategy(), 1), Classifier()
    for _ in range(2):  # before the run, and after it
        assert trainer.strategy.reduce(torch.tensor(3.0)) == 3 and trainer.strategy.reduce(2.5) == 2.5
        assert torch.equal(trainer.strategy.all_gather(torch.ones(2)), torch.ones(2))
        assert trainer.strategy.broadcast("x") == "x" and trainer.strategy.reduce_boolean_decision(True)
        trainer.fit(module, row_loader())
    assert torch.equal(module.all_gather(torch.ones(2)), torch.ones(2))


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), *chain(3, width=8)))


def test_a_batch_norm_that_sees_one_row_says_how_many_micro_batches_help():
    words = r"micro-batch 0 has 1 of the batch's 8 rows, and a batch norm needs 2\. Use num_microbatches=4 or fewer"
    with pytest.raises(Exception, match=words):
        make_trainer(PipelineStrategy(num_microbatches=8), 1).fit(Normed(), row_loader())
    make_trainer(PipelineStrategy(num_microbatches=4), 1).fit(Normed(), row_loader())


@pytest.mark.filterwarnings("default:Batch norms:UserWarning")
def test_batch_norms_are_warned_of_with_numbers_and_one_micro_batch_is_one_process():
    words = r"Batch norms \(`net.1`\) normalise within a micro-batch of 2 rows, where one process has 8: .*"
    with pytest.warns(UserWarning, match=words + r"use num_microbatches=1") as caught:
        make_trainer(PipelineStrategy(num_microbatches=4), 1).fit(Normed(), row_loader())
    assert sum("normalise within" in str(of.message) for of in caught) == 1
    assert_parity(Case(Normed, row_loader, {"num_microbatches": 1}), stages=(2,))


class Recurrent(Trained):
    """Packs and pads in the step."""

    kind = nn.GRU

    def __init__(self) -> None:
        super().__init__()
        self.rnn = self.kind(6, 6, batch_first=True)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(packed, batch_first=True)[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return F.cross_entropy(self.blocks(self.encode(x, lengths).sum(1)), y)


class Lstm(Recurrent):
    kind = nn.LSTM


class Twice(Recurrent):
    """A second recurrent layer takes the packed sequence of the first."""

    def __init__(self) -> None:
        super().__init__()
        blocks, self.again = self.blocks, nn.GRU(6, 6, batch_first=True)
        del self.blocks
        self.blocks = blocks  # behind both

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(self.again(packed)[0], batch_first=True)[0]


class Encoder(nn.Module):
    """Packs, runs and pads within."""

    def __init__(self, of: Recurrent) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: part for name, part in of.named_children() if name != "blocks"})

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers.values():
            packed, _ = layer(packed)
        return pad_packed_sequence(packed, batch_first=True)[0]


class InOneModule(Trained):
    """What the message says."""

    def __init__(self, of: Recurrent) -> None:
        super().__init__()
        self.encoder, self.blocks = Encoder(of), of.blocks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return F.cross_entropy(self.blocks(self.encoder(x, lengths).sum(1)), y)


def sequences() -> DataLoader:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 3, 4, 2, 5, 3, 4, 2])
    return DataLoader(
        [(torch.randn(8, 5, 6, generator=g), lengths, torch.randint(3, (8,), generator=g)) for _ in range(3)],
        batch_size=None,
    )


@pytest.mark.parametrize("make", [Recurrent, Lstm, Twice])
def test_packed_sequences_that_units_return(make):
    """One stage runs them; several say what to do, and then do."""
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    make_trainer(PipelineStrategy(num_microbatches=2), 1).fit(module, sequences())
    make_trainer("auto", 1).fit(plain, sequences())
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=2e-5, atol=2e-6)
    strategy = {"blocks": ["blocks.0", "blocks.2"], "num_microbatches": 2}
    text = failure_of(Case(make, sequences, strategy, validate=False))
    assert "Pack, run the recurrent layer and pad in the forward of one module" in text
    case = Case(lambda: InOneModule(make()), sequences, {**strategy, "num_microbatches": 1}, validate=False)
    assert_parity(case, stages=(2,))


class Saves(BasePredictionWriter):
    """As in Lightning's documentation."""

    def __init__(self, interval: Any = "batch_and_epoch") -> None:
        super().__init__(interval)
        self.rows: list[int] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.rows += [*prediction.argmax(-1).tolist()]

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.rows += [row for prediction in predictions for row in prediction.argmax(-1).tolist()]


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_an_ordinary_writer_writes_every_row_once(interval):
    def predict(strategy: Any, devices: int) -> list[int]:
        torch.manual_seed(0)
        writer = Saves(interval)
        trainer = make_trainer(strategy, devices, [writer])
        trainer.predict(Classifier(), row_dataset(24, 8), return_predictions=interval != "batch")
        assert not vars(writer).keys() & {"write_on_batch_end", "write_on_epoch_end"}
        return writer.rows

    def run(rank: int, port: int) -> list[int]:
        join_as_torchrun(rank, 2, port)
        return predict(PipelineStrategy(num_microbatches=2), 2)

    Classifier.predict_step = lambda self, batch, batch_idx: self(batch[0])  # type: ignore[attr-defined]
    try:
        assert run_ranks(run, 2, free_port(), group=False) == [predict("auto", 1), []]
    finally:
        del Classifier.predict_step  # type: ignore[attr-defined]


class Odd:
    """Nothing that weights_only=True would read."""


class SavesAnObject(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["odd"] = Odd()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["odd"]


class AtStart(Callback):
    """Looks at what was restored, where Lightning's own callbacks do."""

    def __init__(self) -> None:
        self.count, self.seen = 0, -1

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def on_fit_start(self, *args: Any) -> None:
        self.seen = self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.skipif(
    "weights_only" not in inspect.signature(Trainer.fit).parameters, reason="Lightning has the argument from 2.6 on"
)
@pytest.mark.parametrize("strategy", [lambda: PipelineStrategy(num_microbatches=1), HybridStrategy])
def test_weights_only_is_heeded_and_callbacks_are_restored_before_fit_starts(tmp_path, strategy):
    trainer = make_trainer(strategy(), 1, [AtStart()])
    trainer.fit(SavesAnObject(), row_loader())
    trainer.save_checkpoint(path := tmp_path / "a.ckpt")
    module, callback = SavesAnObject(), AtStart()
    again = make_trainer(strategy(), 1, [callback], max_steps=5)
    again.fit(module, row_loader(), ckpt_path=path, weights_only=False)
    assert isinstance(module.loaded, Odd) and (callback.seen, callback.count) == (3, 5)
    with pytest.raises(Exception, match="weights_only"):
        make_trainer(strategy(), 1, max_steps=5).fit(SavesAnObject(), row_loader(), ckpt_path=path, weights_only=True)


def test_a_spent_timer_trains_no_further_step(tmp_path):
    def resumed(strategy: Callable[[], Any]) -> int:
        trainer = make_trainer(strategy(), 1, [Timer(timedelta(hours=1))])
        trainer.fit(Classifier(), row_loader())
        trainer.callbacks[0]._offset = 7200  # the time of earlier runs
        trainer.save_checkpoint(path := tmp_path / "t.ckpt")
        again = make_trainer(strategy(), 1, [Timer(timedelta(hours=1))], max_steps=6)
        again.fit(Classifier(), row_loader(), ckpt_path=path)
        return again.global_step

    assert resumed(lambda: PipelineStrategy(num_microbatches=1)) == resumed(lambda: "auto")


class Copies(Callback):
    """Copies the Trainer's callbacks in mid-run."""

    def __init__(self) -> None:
        self.copied: Any = None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.copied is None:
            self.copied = copy.deepcopy([c for c in trainer.callbacks if c is not self])


@pytest.mark.parametrize(
    "strategy", [lambda: PipelineStrategy(num_microbatches=2), HybridStrategy, lambda: ZeROStrategy(stage=2)]
)
def test_a_trainer_can_be_saved_behind_a_run_and_its_callbacks_copied_in_one(strategy):
    callback = Copies()
    trainer = make_trainer(strategy(), 1, [callback, Timer()], enable_progress_bar=True)
    trainer.fit(Classifier(), row_loader(), row_loader())
    assert len(callback.copied) == len(trainer.callbacks) - 1
    callback.copied = None
    torch.save(trainer, saved := io.BytesIO())
    saved.seek(0)
    assert torch.load(saved, weights_only=False).global_step == trainer.global_step == 3


class Pretrained(nn.Sequential):
    """As models of transformers save themselves."""

    def save_pretrained(self, path: Any) -> None:
        torch.save({name: value.clone() for name, value in self.state_dict().items()}, path)


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        (lambda: PipelineStrategy(num_microbatches=2), "stage of the model"),
        (
            lambda: TensorParallelStrategy(tensor_plan={"net.0": "colwise", "net.2": "rowwise"}),
            "part of what tensor_plan cuts",
        ),
    ],
    ids=["pipeline", "tensor"],
)
def test_a_part_says_how_the_whole_model_is_saved_and_that_works(strategy: Any, share: str, tmp_path):
    def run(rank: int, port: int) -> str:
        join_as_torchrun(rank, 2, port)
        torch.manual_seed(0)
        module = Classifier(Pretrained(*chain(4)))
        trainer = make_trainer(strategy(), 2)
        trainer.fit(module, row_loader())
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
        with pytest.raises(RuntimeError) as caught:
            module.net.save_pretrained(tmp_path / f"{rank}.pt")
        return str(caught.value)

    words = run_ranks(run, 2, free_port(), group=False)
    assert all(f"this rank's {share} alone. Call trainer.save_checkpoint(path) on every rank" in of for of in words)
    module = Classifier(Pretrained(*chain(4)))
    module.load_state_dict(torch.load(tmp_path / "whole.ckpt")["state_dict"])
    module.net.save_pretrained(tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt").keys() == module.net.state_dict().keys()


class Scaled(Classifier):
    """A temperature without a dimension, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.logit_scale.exp()


def test_a_scalar_under_fsdp2_is_told_what_divides_it_and_that_does():
    def run(rank: int, port: int) -> list[Any]:
        join_as_torchrun(rank, 2, port)
        with pytest.raises(
            Exception, match=r"`logit_scale` has none\. Use ZeROStrategy\(stage=2\), or HybridStrategy\(zero"
        ):
            make_trainer(ZeROStrategy(stage=3), 2).fit(Scaled(), row_loader())
        return []

    def trains(rank: int, port: int) -> list[float]:
        join_as_torchrun(rank, 2, port)
        found = []
        for strategy in (ZeROStrategy(stage=2), HybridStrategy(data_parallel_size=2, zero_stage=3)):
            torch.manual_seed(0)
            trainer = make_trainer(strategy, 2, use_distributed_sampler=False)
            trainer.fit(Scaled(), row_loader())
            found.append(trainer.callback_metrics["loss"].item())
        return found

    assert any(outcome.returned for outcome in rank_outcomes(run, 2, free_port(), group=False))
    plain = make_trainer("auto", 1)
    torch.manual_seed(0)
    plain.fit(Scaled(), row_loader())
    for losses in run_ranks(trains, 2, free_port(), group=False):
        assert losses == pytest.approx([plain.callback_metrics["loss"].item()] * 2, rel=2e-5)


class Gan(LightningModule):
    """Two optimizers, and so manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = chain(4, width=6), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.generator(batch[0])
        loss = self.critic(made.detach()).mean() + self.critic(made.detach().roll(1, 0)).pow(2).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        loss = -self.critic(self.generator(batch[0])).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def test_several_optimizers_are_told_of_zero_which_runs_them():
    with pytest.raises(ValueError, match=r"With several optimizers \(a GAN\) use ZeROStrategy\(stage=2\)"):
        make_trainer(PipelineStrategy(), 1).fit(Gan(), row_loader())

    def run(rank: int, port: int) -> Any:
        join_as_torchrun(rank, 2, port)
        torch.manual_seed(0)
        trainer = make_trainer(ZeROStrategy(stage=2), 2, max_steps=6, use_distributed_sampler=False)
        trainer.fit(module := Gan(), row_loader())
        return {name: value.detach().clone() for name, value in module.state_dict().items()}

    torch.manual_seed(0)
    plain = Gan()
    make_trainer("auto", 1, max_steps=6).fit(plain, row_loader())
    for state in run_ranks(run, 2, free_port(), group=False):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=2e-5, atol=2e-6)
