"""What was once silently wrong, or crashed without help: each equals one process now, or is refused in words."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.trainer.modules import CLASSES, WIDTH, Classifier, chain, row_loader, rows
from tests.trainer.pipelines import Case, assert_parity, failure_of, many_on_stages, one_process


class WithoutIndex(Classifier):
    """Its steps do not take `batch_idx`."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_accumulation_where_the_step_takes_no_index():
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    assert_parity(Case(WithoutIndex, lambda: row_loader((8, 8, 8, 8)), trainer=options), stages=(2,))


class Unused(Classifier):
    """A bare parameter that the step does not use: AdamW must not decay it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.ones(4))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


def test_a_bare_parameter_that_nobody_uses_has_no_gradient():
    assert_parity(Case(Unused, row_loader), stages=(2,))


class Adagrad(Classifier):
    """An optimizer that makes its state at construction."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2)


def test_an_optimizer_that_makes_its_state_at_construction():
    assert_parity(Case(Adagrad, row_loader), stages=(2,))


def test_one_activation_used_twice():
    shared = nn.ReLU()
    assert_parity(Case(lambda: Classifier(chain(between=lambda: shared)), row_loader), stages=(2,))


class Scale(nn.Module):
    """A layer with a table that all blocks share."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), table

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table.scale


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))


def sharing_a_table() -> Classifier:
    table = Table()
    return Classifier(nn.Sequential(*(Scale(table) for _ in range(4)), nn.Linear(8, 4)))


def test_a_module_with_a_buffer_that_blocks_share():
    assert_parity(Case(sharing_a_table, lambda: row_loader(width=8)), stages=(2,))


class Auxiliary(nn.Module):
    """Leaves an auxiliary loss on itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.aux = y.pow(2).mean()
        return y


class SumsAuxiliary(Classifier):
    """Adds what its blocks left on themselves to the loss."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Auxiliary(8) for _ in range(4)), nn.Linear(8, 4)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + sum(block.aux for block in self.net[:4])


def test_an_attribute_that_another_stages_block_set_is_refused():
    text = failure_of(Case(SumsAuxiliary, lambda: row_loader(width=8), validate=False))
    assert "`aux` set beside the output of `net.0` (stage 0)" in text


class HookedFeatures(Classifier):
    """Uses what a hook on an early block collected."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.net[0].register_forward_hook(lambda module, args, output: self.seen.append(output))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + self.seen[0].pow(2).mean()


def test_what_a_hook_on_another_stages_block_collected_is_refused():
    assert "the output of `net.0` (stage 0)" in failure_of(Case(HookedFeatures, row_loader, validate=False))


class Counts(Classifier):
    """Logs in a hook what its steps counted."""

    def on_validation_epoch_start(self) -> None:
        self.count = 0.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.count += 1

    def on_validation_epoch_end(self) -> None:
        self.log("count", self.count)


def test_hooks_that_log_different_values_on_the_ranks_are_refused():
    text = failure_of(Case(Counts, row_loader, trainer={"max_epochs": 2}))
    assert "The ranks logged different values of 'count' (rank 1 unlike rank 0)" in text


class Gated(nn.Module):
    """A block that may take a second value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.layer(x))
        return y if gate is None else y * gate


class GatedInValidation(Classifier):
    """Its blocks take a second value of the first stage in validation only."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([nn.Linear(8, 8), *(Gated() for _ in range(3)), nn.Linear(8, 4)]))

    def forward(self, x: Tensor, gated: bool = False) -> Tensor:
        x = self.net[0](x)
        gate = torch.sigmoid(x) if gated else None
        for block in list(self.net)[1:-1]:
            x = block(x, gate)
        return self.net[-1](x)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0], gated=True), batch[1]))


@pytest.mark.parametrize("options", [{"num_microbatches": 1}, {"dynamic_shapes": True}])
def test_what_a_stage_needs_is_answered_signature_by_signature(options):
    """A signature that is seen once leaves its answer unread; the next one's must not be taken for it."""
    case = Case(GatedInValidation, lambda: row_loader((8, 6, 5), width=8), options, {"max_epochs": 3})
    assert_parity(case, stages=(2, 4))


class Segments(Classifier):
    """Checkpoints five layers at a time, across the boundaries of stages."""

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.net), 5):
            x = checkpoint(self.net[first : first + 5], x, use_reentrant=False)
        return x


def test_recomputation_across_a_boundary():
    assert_parity(Case(Segments, row_loader), stages=(2, 4))


class Draws(Classifier):
    """Notes a random number of every validation batch."""

    def on_train_start(self) -> None:
        self.drawn: list[float] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.drawn.append(float(torch.rand(())))
        super().validation_step(batch, batch_idx)


def drawn(trainer: Trainer, module: LightningModule) -> list[float]:
    return module.drawn


def test_every_validation_batch_draws_numbers_of_its_own():
    case = Case(Draws, row_loader, {"num_microbatches": 1}, {"max_epochs": 1, "num_sanity_val_steps": 2}, at_end=drawn)
    [records] = many_on_stages([case], 2)
    numbers = [record.extra for record in records]
    assert numbers[0] == numbers[1], "all stages draw alike"
    assert len(numbers[0]) == 3 == len(set(numbers[0]))


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("partition", "foo", "partition is"),
        ("partition", [], "partition is"),
        ("blocks", 5, "blocks is"),
        ("stages", ["a"], "stages is"),
        ("loss_weight", 3, "loss_weight is a function"),
        ("receive_ahead", "x", "receive_ahead is"),
        ("num_microbatches", 2.5, "num_microbatches is at least 1"),
        ("check_loss", "no", "check_loss is True or False"),
        ("schedule", 5, "schedule is a name"),
        ("timeout", 30, "use datetime.timedelta"),
        ("patience", 10, "use lightning_parallel.failure.patience.Patience"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(argument, value, words):
    from lightning_parallel.strategies import PipelineStrategy

    with pytest.raises(ValueError, match=words):
        PipelineStrategy(**{argument: value})


class LogsMore(Classifier):
    """Logs a mean over rows, and what the test asks for."""

    def __init__(self, name: str, log: Callable[[Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.name, self.value_of, self.options = name, log, options

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("hits", (logits.argmax(-1) == y).float().mean())
        self.log("one", 1.0)
        self.log("rows", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(self.name, self.value_of(logits, y), **self.options)
        return F.cross_entropy(logits, y)


@pytest.mark.parametrize(
    ("name", "log", "options"),
    [
        ("perplexity", lambda logits, y: F.cross_entropy(logits, y).exp(), {}),
        ("largest", lambda logits, y: F.cross_entropy(logits, y), {"reduce_fx": "max"}),
        ("rows of a step", lambda logits, y: len(y), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_logged_value_that_is_no_mean_over_rows_is_told_of(name: str, log: Any, options: dict[str, Any]):
    """Warnings are errors here."""
    case = Case(lambda: LogsMore(name, log, **options), row_loader)
    message = failure_of(case, 2)
    assert re.search(
        rf"The step logs '{name}': \S+ for a whole batch, and \S+ joined over its \d micro-batches", message
    )
    assert "self.log(name, metric)" in message


NOT_LOGGED = {
    "text": lambda logits, y: "good",
    "nothing": lambda logits, y: None,
    "parts": lambda logits, y: {"mean": logits.detach().mean()},
    "three": lambda logits, y: torch.ones(3),
}


@pytest.mark.parametrize("kind", ["text", *(pytest.param(k, marks=pytest.mark.slow) for k in list(NOT_LOGGED)[1:])])
def test_a_value_that_cannot_be_logged_is_refused_as_in_one_process(kind: str):
    case = Case(lambda: LogsMore(kind, NOT_LOGGED[kind]), row_loader)
    with pytest.raises(ValueError, match=rf"`self\.log\({kind}, ") as told:
        one_process(case)
    kept = str(told.value).partition("was called")[2].partition("You can try")[0]
    assert f"self.log({kind}, " in (message := failure_of(case)) and kept in message


class Recurrent(Classifier):
    """Carries the hidden state of its recurrent layer from batch to batch, or takes it anew; keeps what it gave."""

    def __init__(self, carries: bool) -> None:
        super().__init__()
        self.rnn, self.carries = nn.LSTM(WIDTH, WIDTH), carries
        self.hidden: tuple[Tensor, Tensor] | None = None
        self.table: Tensor | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.table is None:
            self.table = torch.ones(len(x))
        out, hidden = self.rnn(x[None] * self.table.mean(), self.hidden if self.carries else None)
        self.hidden = tuple(state.detach() for state in hidden)
        loss = F.cross_entropy(self(out[0]), y)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("stages", [2, 3])
def test_state_that_is_carried_from_batch_to_batch_is_refused(stages: int):
    options = {"stages": {"rnn": 0}}
    message = failure_of(Case(lambda: Recurrent(True), row_loader, options), stages)
    assert "The step leaves `self.hidden` behind, and its next run reads it" in message


def test_state_that_nobody_reads_and_tables_that_stay_are_not_carried():
    assert_parity(Case(lambda: Recurrent(False), row_loader, {"stages": {"rnn": 0}}), stages=(2,))


def test_batch_norms_are_not_synchronised_without_saying_so():
    case = Case(lambda: Classifier(chain(between=lambda: nn.BatchNorm1d(WIDTH))), row_loader)
    text = failure_of(case.but(trainer={"sync_batchnorm": True}))
    assert text.startswith("Trainer(sync_batchnorm=True) has no effect with PipelineStrategy, whose batch norm `net.1`")


class Detector(Classifier):
    """Its targets are a list of one entry a row, of several lengths, as those of detection are."""

    def loss(self, batch: Any) -> Tensor:
        x, targets = batch
        pairs = zip(self(x), targets, strict=True)
        loss = torch.stack([(found - target["wanted"]).square().mean() for found, target in pairs]).mean()
        self.log("own", loss, batch_size=len(x))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def targets() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    wanted = [[{"wanted": torch.randn(1 + i % 3, CLASSES, generator=generator)} for i in range(8)] for _ in range(3)]
    return [(x, some) for (x, _), some in zip(rows(), wanted, strict=True)]


def test_lists_of_one_entry_a_row_go_with_their_rows():
    """Each micro-batch was handed all targets; an evaluation paired its rows with those of the first micro-batch."""
    loader = lambda: DataLoader(targets(), batch_size=None)  # noqa: E731
    assert_parity(Case(Detector, loader), stages=(2,))


class LogsNumbers(Classifier):
    """Logs what it is given beside its loss."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", self.number)
        return super().training_step(batch, batch_idx)


def test_an_infinite_number_is_what_it_is_over_micro_batches_too():
    assert_parity(Case(lambda: LogsNumbers(float("inf")), row_loader), stages=(2,))  # warnings are errors


def test_a_logged_vector_is_refused_as_lightning_does():
    text = failure_of(Case(lambda: LogsNumbers(torch.ones(2)), row_loader))
    assert text.startswith("`self.log(number, tensor([1., 1.]))` was called, but the tensor must have a single element")


class Hooked(Classifier):
    """Halves gradients once they are there."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def test_hooks_on_gradients_that_are_no_sum_yet_are_refused():
    text = failure_of(Case(Hooked, row_loader))
    assert text.startswith("`net.0.weight` has a hook of register_post_accumulate_grad_hook, which would be called for")
    assert_parity(Case(Hooked, row_loader, {"num_microbatches": 1}), stages=(2,))
