"""TeraPipe: causal models train in slices of their sequences as in one process; what is not causal is refused."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import BubbleMonitor, MemoryMonitor
from lightning_parallel.demo import GPT
from lightning_parallel.pipeline.runtime.engine import Engine
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.strategies import HybridStrategy, PipelineStrategy
from tests.trainer.architectures import BERT, DECODER, padded_texts, placed_texts, texts, tiny
from tests.trainer.modules import Classifier, row_loader, token_loader
from tests.trainer.pipelines import (
    BF16,
    Case,
    assert_parity,
    assert_same,
    failure_of,
    make_trainer,
    many_on_stages,
    on_stages,
    one_process,
)
from tests.trainer.test_data_axis import assert_all_rows, on_copies
from tests.trainer.test_parity import KEY_BIAS, gpt, hugging_face

THREE = {"schedule": "terapipe", "num_microbatches": 2, "slices": 3}
CLIPPED = {"max_steps": 3, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
Make = Callable[[], LightningModule]


def rows_of_eight() -> DataLoader:
    return token_loader(((8, 8),) * 6)


def last_schedule(trainer: Trainer, module: LightningModule) -> Any:
    """What the newest step ran: the text of this rank's row."""
    if not isinstance(trainer.strategy, PipelineStrategy):
        return None
    assert trainer.strategy.stats is not None
    latest = trainer.strategy.stats.latest
    return latest.name, latest.actions[trainer.strategy.row]


def case(make: Make, loader: Callable[[], DataLoader] = rows_of_eight, **strategy: Any) -> Case:
    return Case(make, loader, {**THREE, **strategy}, CLIPPED, at_end=last_schedule)


def assert_sliced(records: Any) -> None:
    """The newest step ran slices on every rank."""
    for record in records:
        name, actions = record.extra
        assert name.startswith("terapipe")
        assert {action.slice for action in actions} == {0, 1, 2}


# -- parity ------------------------------------------------------------------------------------------------------------


def test_a_gpt_on_two_stages_is_one_process():
    run = case(gpt)
    records = on_stages(run, 2)
    assert_same(records, one_process(run), leave_out=KEY_BIAS)
    assert_sliced(records)


CACHED = {**DECODER, "use_cache": True}
CAUSAL: dict[str, tuple[Case, int]] = {
    "gpt, 4": (case(gpt), 4),
    "gpt without a mask, 2": (case(lambda: gpt(explicit_mask=False)), 2),
    "gpt without a mask, 4": (case(lambda: gpt(explicit_mask=False)), 4),
    "gpt2, 2": (case(lambda: hugging_face("gpt2")), 2),
    "llama, 2": (case(lambda: hugging_face("llama")), 2),
    "llama, 4": (case(lambda: hugging_face("llama")), 4),
    "padded llama with positions": (case(tiny("LlamaForCausalLM", "LlamaConfig", DECODER), placed_texts), 2),
    "llama with a cache": (case(tiny("LlamaForCausalLM", "LlamaConfig", CACHED), texts), 2),
    "lengths of one's own": (case(gpt, slices=[5, 2, 1]), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models_are_one_process(name):
    run, num_stages = CAUSAL[name]
    run = run.but(trainer={"max_epochs": 4}) if run.loader is not rows_of_eight else run
    records = on_stages(run, num_stages)
    assert_same(records, one_process(run), leave_out=KEY_BIAS)
    assert_sliced(records)


class Counting(GPT):
    """Counts its steps and logs before it calls the model; its statistics are those of a norm before the blocks."""

    def __init__(self) -> None:
        super().__init__(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4)
        self.count, self.seen, self.before = 0, [], nn.BatchNorm1d(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.before(self.embedding(tokens).mT).mT
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        self.seen.append(batch_idx)
        self.log("tokens", float(batch["input_ids"].sum()), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def counted(trainer: Trainer, module: Any) -> Any:
    return module.count, module.seen


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])  # one runs whole sequences
def test_a_step_counts_and_logs_once_for_a_micro_batch(num_stages):
    """Of one micro-batch, as BatchNorm sees a batch in one process."""
    run = replace(case(Counting, num_microbatches=1, stages={"before": 0}), at_end=counted)
    records, reference = on_stages(run, num_stages), one_process(run)
    assert_same(records, reference, leave_out=KEY_BIAS)
    assert records[0].extra == reference.extra


class PartlyFrozen(GPT):
    """The embedding, the first block and one product of the third do not train."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        for part in (self.embedding, self.blocks[0], self.blocks[2].qkv):
            part.requires_grad_(False)
        return super().configure_optimizers()


def partly_frozen() -> GPT:
    return PartlyFrozen(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4)


@pytest.mark.slow
def test_parameters_that_do_not_train():
    assert_parity(case(partly_frozen), (2, 4), leave_out=KEY_BIAS)


@pytest.mark.slow
def test_mixed_precision():
    assert_parity(case(gpt).but(trainer={"precision": "bf16-mixed"}), (2,), BF16, BF16, KEY_BIAS)


@pytest.mark.slow
def test_every_new_length_runs_whole_once():
    """The second batch of a length is sliced, and batches of other lengths before and behind it change nothing."""
    lengths = ((8, 8), (8, 12), (8, 8), (5, 12), (8, 12), (8, 8))
    run = case(gpt, lambda: token_loader(lengths)).but(trainer={"accumulate_grad_batches": 1, "max_steps": 6})
    assert_same(records := on_stages(run, 2), one_process(run), leave_out=KEY_BIAS)
    assert_sliced(records)


@pytest.mark.slow
def test_masks_of_dropout_are_the_same_on_any_number_of_stages():
    run = case(lambda: gpt(dropout=0.2), slices=2)
    first = on_stages(run, 2)[0]
    assert_same(on_stages(run, 4), first, leave_out=KEY_BIAS)
    whole = on_stages(run.but({"schedule": "gpipe", "slices": None}), 2)[0]
    assert not torch.allclose(torch.stack(whole.losses[1:]), torch.stack(first.losses[1:]))


def shares(copies: int) -> DataLoader:
    """Ready batches of the rows of one of two copies, or of both."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(11, (8, 8), generator=generator) for _ in range(6)]
    copy = int(os.environ["RANK"]) // 2 if copies > 1 else 0
    return DataLoader([{"input_ids": batch.chunk(copies)[copy]} for batch in batches], batch_size=None)


class Averaged(GPT):
    """A GPT by SGD whose logged loss is that of all copies."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.slow
def test_copies_side_by_side_are_one_process_with_all_rows():
    def make() -> GPT:
        return Averaged(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4)

    options = {"max_steps": 5, "gradient_clip_val": 0.05, "use_distributed_sampler": False}
    run = Case(make, lambda: shares(2), THREE, options, validate=False, at_end=last_schedule)
    records = on_copies(run, 2, 2)
    assert_all_rows(run, one_process(run.but(loader=lambda: shares(1))), records)
    assert_sliced(records)


# -- measured beside promised ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bubble_and_memory_stand_beside_what_the_schedule_promises():
    """D = 2, M = 2, K = 3: a bubble of (D - 1) / (M K + D - 1) = 1/7, and both micro-batches are held."""
    monitors = {"callbacks": lambda: [BubbleMonitor(), MemoryMonitor()]}
    run = case(gpt).but(trainer={**monitors, "accumulate_grad_batches": 1, "max_steps": 4}, validate=False)
    [records] = many_on_stages([run], 2)
    logged = records[0].metrics[-1]
    assert logged["logged/parallel/bubble_idle_formula"] == pytest.approx(1 / 7)
    assert 0 < logged["logged/parallel/bubble_idle"] < 1
    for rank in (0, 1):
        key = "logged/parallel/memory_activations_microbatches"
        assert logged[f"{key}_expected/rank_{rank}"] == 2
        assert logged[f"{key}/rank_{rank}"] == pytest.approx(2)


# -- refusals ----------------------------------------------------------------------------------------------------------


class BothWays(GPT):
    """Attends to later tokens too."""

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Prefix(GPT):
    """Causal for even batches; the first three tokens of odd ones see each other."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.open = batch_idx == 2
        return super().training_step(batch, batch_idx)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask[:3, :3] |= self.open
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Between(GPT):
    """Computes between blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = 0.5 * x + block(x)
        return self.head(self.norm(x))


class Pooled(GPT):
    """Reads what the first block of its stage returned."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, first = self.embedding(tokens), None
        for block in self.blocks:
            x = block(x)
            first = x if block is self.blocks[2] else first
        return self.head(self.norm(x + F.relu(first)))


class TwiceCalled(GPT):
    """Calls the model two times a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch) + self._loss({"input_ids": batch["input_ids"].flip(1)})


class Hooked(GPT):
    """Has a hook inside a block."""

    def on_train_start(self) -> None:
        self.blocks[1].norm_1.register_forward_hook(lambda *call: None)


class Noted(GPT):
    """Blocks note a tensor in passing."""

    def on_train_start(self) -> None:
        block, attend = self.blocks[1], self.blocks[1]._attend

        def noting(x: Tensor, mask: Tensor | None) -> Tensor:
            block.seen = attend(x, mask)
            return block.seen

        block._attend = noting


class Reentrant(GPT):
    """Checkpoints attention in a way that makes no graph in the forward."""

    def on_train_start(self) -> None:
        for block in self.blocks:
            block._attend = partial(checkpoint, block._attend, use_reentrant=True)


class Unseeded(GPT):
    """Checkpoints that do not say which slice they repeat."""

    def on_train_start(self) -> None:
        for block in self.blocks:
            block._attend = partial(checkpoint, block._attend, use_reentrant=False, preserve_rng_state=False)


def of(kind: type[GPT]) -> Make:
    return lambda: kind(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4)


REFUSED: dict[str, tuple[Case, str]] = {
    "an encoder": (
        case(tiny("BertForSequenceClassification", "BertConfig", BERT), padded_texts),
        "A mask that `model.bert.encoder.layer.0` is called with lets positions see later ones",
    ),
    "too few tokens": (case(gpt, slices=9), "A sequence of 8 tokens cannot be cut into 9 slices. Use fewer slices"),
    "other lengths": (
        case(gpt, slices=[5, 2]),
        "slices=[5, 2] are 7 tokens, but the sequences of a micro-batch have 8",
    ),
    "a mask that looks ahead": (
        case(of(BothWays)),
        "A mask that `blocks.0` is called with lets positions see later ones",
    ),
    "one later on": (case(of(Prefix)), "lets positions see later ones"),
    "between blocks": (case(of(Between)), "runs nothing but blocks on slices"),
    "a block's result": (case(of(Pooled)), "the output of `blocks.2` (stage 1), whose data stage 1 does not hold"),
    "two calls": (case(of(TwiceCalled)), "The step calls the model several times, and a schedule of token slices"),
    "a hook": (case(of(Hooked)), "A forward hook on `blocks.1` or inside it would be called with slices"),
    "an attribute": (case(of(Noted)), "Block `blocks.1` leaves tensors in its attribute `seen`"),
    "attention by hand": (
        case(tiny("LlamaForCausalLM", "LlamaConfig", {**DECODER, "attn_implementation": "eager"}), texts),
        'attn_implementation="sdpa"',
    ),
    "checkpoints without random numbers": (
        case(of(Unseeded)),
        "checkpoints with preserve_rng_state=False, or around several attentions",
    ),
    "reentrant checkpoints": (case(of(Reentrant)), "an activation checkpoint with use_reentrant=True"),
    "rows without positions": (
        case(Classifier, lambda: row_loader((8, 8))),
        "Token slices are for blocks whose positions meet in causal attention",
    ),
}
QUICK = {"an encoder", "too few tokens"}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # transformers 5
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the check has no gradients
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in REFUSED])
def test_what_has_no_slices_is_refused(name):
    run, words = REFUSED[name]
    assert words in failure_of(run.but(trainer={"max_steps": -1, "max_epochs": 2, "accumulate_grad_batches": 1}))


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "recompute": (
        {"recompute": "stage"},
        "(recompute='stage') does not go with a schedule of token slices. Use recompute='none' or recompute='block'",
    ),
    "graphs": ({"cuda_graphs": True}, "(cuda_graphs=True) does not go with a schedule of token slices"),
    "dynamic": ({"dynamic_shapes": True}, "(dynamic_shapes=True) does not go with a schedule of token slices"),
    "skips": ({"skip_connections": True}, "(skip_connections=True) does not go with a schedule of token slices"),
    "whole": ({"schedule": "1f1b"}, "(slices=3) goes with a schedule of token slices, which '1f1b' is not"),
    "auto": ({"schedule": "auto"}, "(slices=3) goes with a schedule of token slices, which 'auto' is not"),
    "other": ({"schedule": make("terapipe", 2, 2)}, "(slices=3) are 3 slices, and schedule 'terapipe' has 4"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_slices_do_not_go_with_is_refused_where_the_strategy_is_made(name):
    options, words = ARGUMENTS[name]
    with pytest.raises(ValueError) as caught:
        PipelineStrategy(**{**THREE, **options})
    assert words in str(caught.value)


@pytest.mark.parametrize("options", [{"zero_stage": 3, "gather": "microbatch"}, {"sequence_parallel": True}], ids=str)
def test_what_slices_do_not_go_with_is_refused_in_a_mesh(options):
    name, value = list(options.items())[-1]
    with pytest.raises(
        ValueError, match=rf"HybridStrategy\({name}={value!r}\) does not go with a schedule of token sli"
    ):
        make_trainer(HybridStrategy(**THREE, **options), 1).fit(gpt(), rows_of_eight(), rows_of_eight())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0s0 0F0s1 0I0s1 0W0s1 0I0s0 0W0s0", "has token slices and the action 0I0s1"),
        ("0F0s0 0F0s1 0F1 0B1 0B0s1 0B0s0", "has token slices and the action 0F1"),
        ("0F0s0 1F0s0 1B0s0 0B0s0", "has token slices and 2 stages on 1 ranks"),
    ],
)
def test_the_engine_runs_whole_backwards_of_slices_on_one_stage_a_rank(text, words):
    with pytest.raises(ValueError, match=words):
        Engine.refuse(Schedule.from_text(text))


@pytest.mark.parametrize("slices", [0, True, 1.5, [], [4, 0], "4"], ids=str)
def test_slices_are_a_number_or_lengths(slices):
    with pytest.raises(ValueError, match=r"slices is a number of slices, or a list with the tokens of each"):
        PipelineStrategy(schedule="terapipe", slices=slices)
