"""A pipeline trains what one process trains: losses, weights, optimizer state and everything logged, on every rank."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parallel.demo import GPT, HuggingFaceLM
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.schedule import Schedule
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import (
    CLASSES,
    WIDTH,
    Classifier,
    Mlp,
    Pair,
    chain,
    row_dataset,
    row_loader,
    rows,
    token_loader,
    tokens,
)
from tests.trainer.pipelines import (
    BF16,
    HALF,
    Case,
    all_metrics,
    assert_parity,
    assert_same,
    failure_of,
    join_as_torchrun,
    make_trainer,
    many_on_stages,
    on_stages,
    one_process,
)

# A bias added to every key moves all scores of a query alike, which softmax does not see: its gradient is rounding, and
# Adam divides it by its own size.
KEY_BIAS = {"qkv.bias": slice(16, 32), "c_attn.bias": slice(16, 32)}
RAGGED_TOKENS = ((8, 8), (8, 12), (5, 8), (8, 8), (2, 6))


def gpt(**options: Any) -> GPT:
    return GPT(**{"vocabulary": 11, "context": 16, "width": 16, "num_heads": 2, "num_blocks": 4, **options})


def hugging_face(architecture: str) -> HuggingFaceLM:
    return HuggingFaceLM(architecture, vocabulary=11, context=16, width=16, num_heads=2)


class LateGPT(LightningModule):
    """Builds its layers in `configure_model`, as Lightning advises for large models."""

    training_step, validation_step, configure_optimizers, _loss, forward = (
        GPT.training_step, GPT.validation_step, GPT.configure_optimizers, GPT._loss, GPT.forward,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            built = gpt(tie_embeddings=False)
            self.was_meta = all(p.is_meta for p in built.parameters())
            self.context, self.explicit_mask, self.learning_rate = built.context, True, 1e-3
            for name, child in built.named_children():
                setattr(self, name, child)


class LateLlama(HuggingFaceLM):
    """The same of `transformers`."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.learning_rate, self.model = 1e-3, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = hugging_face("llama").model
            self.was_meta = all(p.is_meta for p in self.model.parameters())


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_module", [Classifier, pytest.param(Mlp, marks=pytest.mark.slow)])
def test_rows_of_numbers(make_module):
    assert_parity(Case(make_module, lambda: row_loader((8, 8, 5, 3)), trainer={"max_epochs": 2}))


@pytest.mark.parametrize(
    "make_module",
    [gpt, *(pytest.param(partial(hugging_face, name), marks=pytest.mark.slow) for name in ("gpt2", "llama"))],
)
def test_language_models(make_module):
    case = Case(make_module, lambda: token_loader(RAGGED_TOKENS), trainer={"max_steps": 5})
    assert_parity(case, leave_out=KEY_BIAS)


def foreign_memory(trainer: Trainer, module: LightningModule) -> tuple[bool, int, int]:
    """Whether parameters were without memory when built; how many are another stage's; how many of those hold data."""
    foreign = [p for p in module.parameters() if isinstance(p, ForeignParameter)]
    with torch._C.DisableTorchFunctionSubclass():
        return module.was_meta, len(foreign), sum(p.data_ptr() != 0 or not p.meta.is_meta for p in foreign)


@pytest.mark.parametrize("make_module", [LateGPT, pytest.param(LateLlama, marks=pytest.mark.slow)])
def test_modules_that_configure_model_builds(make_module):
    case = Case(make_module, token_loader, at_end=foreign_memory)
    for num_stages in (2, 4):
        [records] = many_on_stages([case], num_stages)
        for record in records:
            was_meta, num_foreign, held = record.extra
            assert was_meta and num_foreign > 0 and held == 0
        reference = one_process(case.but(initial=records[0].initial, at_end=None))
        assert_same(records, reference, leave_out=KEY_BIAS)


class Large(Classifier):
    """Four blocks of 32 MiB each, built late; notes how much memory the process took until training began."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1))
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.before = resident_mib()
            self.net = nn.Sequential(*(nn.Linear(2896, 2896) for _ in range(4)))

    def on_train_start(self) -> None:
        self.taken = resident_mib() - self.before

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def resident_mib() -> float:
    """Memory of this process alone, MiB; what a forked process shares with its parent is not counted twice."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) / 1024


def test_a_rank_takes_memory_for_its_own_stage_only():
    for num_stages, own in ((2, 64), (4, 32)):

        def taken(rank: int, port: int, num_stages: int = num_stages) -> float:
            join_as_torchrun(rank, num_stages, port)
            module = Large()
            trainer = make_trainer(PipelineStrategy(num_microbatches=1), num_stages, max_steps=1, limit_val_batches=0)
            trainer.fit(module, row_loader((2,), width=2896), row_loader((2,), width=2896))
            return module.taken

        for mib in run_ranks(taken, num_stages, free_port(), group=False):
            assert own <= mib < own + 30  # threads, connections and Lightning's own objects


def test_initial_values_under_configure_model_do_not_depend_on_the_layout():
    [two], [four] = (many_on_stages([Case(LateGPT, token_loader)], n) for n in (2, 4))
    assert two[0].initial.keys() == four[0].initial.keys()
    assert all(torch.equal(two[0].initial[name], four[0].initial[name]) for name in two[0].initial)


def test_copies_of_a_tied_weight_are_the_same_bits_after_five_adam_steps():
    case = Case(gpt, token_loader, trainer={"max_epochs": 2, "max_steps": 5})
    for num_stages in (2, 4):
        [records] = many_on_stages([case], num_stages)
        holders = [r.own["embedding.weight"] for r in records if "embedding.weight" in r.own]
        assert len(holders) == 2
        assert torch.equal(*holders)
        assert not torch.equal(holders[0], records[0].initial["embedding.weight"])


# -- batches -----------------------------------------------------------------------------------------------------------


class Structured(Classifier):
    """Insists on the structure of what the loader made, micro-batch-sized."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        if self.kind == "dict":
            assert type(batch) is dict and batch["scale"] == 0.5 and batch["tag"] == "a tag" and batch["none"] is None
            assert isinstance(batch["names"], list) and len(batch["names"]) == len(batch["x"]) == len(batch["y"])
            x = batch["x"] * torch.tensor([len(name) for name in batch["names"]])[:, None] * batch["scale"]
            return F.cross_entropy(self(x), batch["y"])
        if self.kind == "nested":
            (x, (y, [z])), shared = batch
            assert len(x) == len(y) == len(z) and shared.shape == (WIDTH,)
            return F.cross_entropy(self(x + z + shared), y)
        assert type(batch) is {"tuple": tuple, "list": list, "namedtuple": Pair}[self.kind]
        return super().loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        x = batch["x"] if self.kind == "dict" else batch[0][0] if self.kind == "nested" else batch[0]
        self.log("loss", loss, batch_size=len(x), on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch["x"] if self.kind == "dict" else batch[0][0] if self.kind == "nested" else batch[0]
        self.log("val_loss", self.loss(batch), batch_size=len(x))


def structured_loader(kind: str) -> DataLoader:
    def one(x: Tensor, y: Tensor) -> Any:
        if kind == "dict":
            names = ["n" * (1 + i % 3) for i in range(len(x))]
            return {"names": names, "tag": "a tag", "x": x, "y": y, "scale": 0.5, "none": None}
        if kind == "nested":
            return [[x, (y, [x.flip(0)])], torch.ones(WIDTH)]
        return {"tuple": tuple, "list": list, "namedtuple": lambda pair: Pair(*pair)}[kind]((x, y))

    return DataLoader([one(x, y) for x, y in rows((8, 5, 8, 2))], batch_size=None, collate_fn=lambda batch: batch)


@pytest.mark.parametrize(
    "kind",
    ["dict", "tuple", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("list", "namedtuple")), "nested"],
)
def test_the_step_sees_the_structure_of_the_batch(kind: str):
    case = Case(lambda: Structured(kind), lambda: structured_loader(kind), trainer={"max_steps": 4})
    assert_parity(case, stages=(2,))


def test_ragged_and_short_last_batches():
    assert_parity(Case(Classifier, lambda: row_loader((8, 5, 3, 1, 8, 2)), trainer={"max_epochs": 2}))
    assert_parity(Case(Classifier, lambda: row_dataset(29, 8), trainer={"max_epochs": 2}), stages=(4,))


def test_shuffled_rows_are_those_of_one_process():
    case = Case(Classifier, lambda: row_dataset(29, 8, shuffle=True), trainer={"max_epochs": 2}, validation=row_loader)
    records = assert_parity(case)
    unshuffled = one_process(case.but(loader=lambda: row_dataset(29, 8)))
    assert not torch.allclose(torch.stack(records[0].losses), torch.stack(unshuffled.losses))


# -- logging -----------------------------------------------------------------------------------------------------------


class Talkative(Classifier):
    """Logs in every way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("plain", loss)
        self.log("bar", loss * 3, prog_bar=True, logger=False)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("number", 3)
        self.log("float", 0.25 * batch_idx, on_epoch=True)
        self.log("counted", (batch[1] >= 0).sum().float(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", batch[0].min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("synced", loss, sync_dist=True, on_epoch=True)
        self.log("rows", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"twice": loss * 2, "half": loss / 2}, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("hook", self.current_epoch + 0.5)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)
        self.log("val_rows", float(len(batch[0])), reduce_fx="sum", add_dataloader_idx=False)


def test_what_a_step_logs():
    case = Case(Talkative, lambda: row_loader((8, 5, 8, 3)), trainer={"max_epochs": 2})
    for record in assert_parity(case):
        assert {
            "callback/both_step",
            "callback/both_epoch",
            "bar/bar",
            "logged/number",
            "callback/hook",
        } <= record.final.keys()
        assert record.final["callback/val_rows"] == 24 and record.final["callback/rows"] == 24
        assert "logged/bar" not in record.final and "bar/plain" not in record.final


class Sometimes(Classifier):
    """Logs a key in the micro-batches whose first row says so."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        if x[0, 0] > 0:
            self.log("some", x[0, 1])
            self.log("number", float(x[0, 1]))
        return self.loss(batch)


def flagged(num_rows: int, first_rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    x, y = rows([num_rows])[0]
    x[:, 0], x[:, 1] = -1.0, torch.arange(float(num_rows))
    x[list(first_rows), 0] = 1.0
    return x, y


def test_a_key_of_some_micro_batches_is_their_mean():
    """By their rows, as every mean of a step: 2 and 4 of micro-batches of two rows; 2 of two rows and 6 of one."""
    batches = [flagged(8, (2, 4)), flagged(7, (2, 6)), flagged(8, (0, 2, 4))]
    wanted = [(2 + 4) / 2, (2 * 2 + 6) / 3, (0 + 2 + 4) / 3]
    case = Case(Sometimes, lambda: DataLoader(batches, batch_size=None), validate=False)
    for record in on_stages(case, 2):
        for key in ("logged/some", "logged/number"):
            assert [metrics[key].item() for metrics in record.metrics] == pytest.approx(wanted), key


# -- the Trainer's options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulated_gradients(accumulate: int):
    case = Case(Mlp, lambda: row_loader((8,) * 5), trainer={"max_epochs": 2, "accumulate_grad_batches": accumulate})
    assert_parity(case)


@pytest.mark.parametrize("algorithm", ["norm", pytest.param("value", marks=pytest.mark.slow)])
def test_gradients_are_clipped_over_the_whole_model(algorithm: str):
    limit = {"norm": 0.05, "value": 0.003}[algorithm]
    case = Case(gpt, token_loader, trainer={"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm})
    case = case.but(make=lambda: with_sgd(gpt()))
    [record] = assert_parity(case, stages=(2,))
    unclipped = one_process(case.but(trainer={"gradient_clip_val": None}))
    assert not torch.allclose(record.weights["head.weight"], unclipped.weights["head.weight"], atol=1e-4)
    assert_parity(case, stages=(4,))


def with_sgd(module: LightningModule, lr: float = 0.1) -> LightningModule:
    """Adam would amplify the rounding of small gradients; SGD shows a wrong scale as it is."""
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    return module


@pytest.mark.parametrize("make_module", [Classifier, pytest.param(lambda: with_sgd(gpt()), marks=pytest.mark.slow)])
def test_bf16_mixed(make_module):
    loader = row_loader if make_module is Classifier else token_loader
    assert_parity(Case(make_module, loader, trainer={"precision": "bf16-mixed"}), loss=BF16, weights=BF16)


class LoudInput(Classifier):
    """The first layer's gradient is sixteen times as large as the others', so it overflows alone."""

    def __init__(self) -> None:
        super().__init__(chain(4, nn.ReLU))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(16 * x), y)


def half_precision() -> list[MixedPrecision]:
    """Float16 on a CPU, with a scale that is too large at first and grows again soon."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler)]


def scale_and_skips(trainer: Trainer, module: LightningModule) -> tuple[float, int]:
    return trainer.precision_plugin.scaler.get_scale(), trainer.precision_plugin.scaler._growth_tracker.item()


def test_float16_has_one_scale_and_skips_steps_everywhere():
    """One process accumulates what the micro-batches give, so that the same numbers overflow."""
    make = lambda: with_sgd(LoudInput(), lr=1e-3)  # noqa: E731
    batches = list(row_loader((8,) * 9))
    parts = [Pair(*part) for x, y in batches for part in zip(x.split(2), y.split(2), strict=True)]
    options = {"max_epochs": 1, "limit_val_batches": 0}
    plain = {**options, "accumulate_grad_batches": 4, "plugins": half_precision()}
    reference = one_process(
        Case(make, lambda: DataLoader(parts, batch_size=None), trainer=plain, at_end=scale_and_skips)
    )
    assert reference.extra[0] < 2.0**20
    for num_stages in (2, 4):
        trainer = {**options, "plugins": half_precision()}
        case = Case(make, lambda: row_loader((8,) * 9), {"num_microbatches": 4}, trainer, at_end=scale_and_skips)
        records = on_stages(case, num_stages)
        assert [record.extra for record in records] == [reference.extra] * num_stages
        for name, weight in reference.weights.items():
            torch.testing.assert_close(records[0].weights[name], weight, **HALF)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_true_precision(precision: str):
    tolerance = BF16 if precision == "bf16-true" else {"rtol": 1e-12, "atol": 1e-12}
    case = Case(Classifier, row_loader, trainer={"precision": precision})
    assert_parity(case, stages=(2,), loss=tolerance, weights=tolerance)


class Scheduled(Classifier):
    """A scheduler that steps every batch, and one that watches a logged value."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        watching = {"scheduler": plateau, "monitor": "val_loss"}
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, watching]


def test_learning_rate_schedulers():
    assert_parity(Case(Scheduled, row_loader, trainer={"max_epochs": 3}), stages=(2,))


# -- the strategy's options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_way_to_give_a_schedule(num_stages: int, tmp_path):
    zigzag = Schedule(
        "forwards in pairs", tuple(_in_pairs(stage) for stage in range(num_stages)),
        {(0, stage): stage for stage in range(num_stages)}, num_microbatches=4,
    )  # fmt: skip
    zigzag.check()
    path = tmp_path / "mine.csv"
    make("gpipe", num_stages, 4).to_csv(path)
    case = Case(Classifier, row_loader, validate=False)
    reference = one_process(case)
    given = ["gpipe", "1f1b", "naive", "1F1B", str(path), path, zigzag]
    for records in many_on_stages([case.but({"schedule": schedule}) for schedule in given], num_stages):
        assert_same(records, reference)


def _in_pairs(stage: int) -> tuple:
    from lightning_parallel.pipeline.schedule import Action

    return tuple(Action(kind, stage, m) for m in (0, 2) for kind, m in (("F", m), ("F", m + 1), ("B", m), ("B", m + 1)))


def test_a_schedule_of_ones_own_takes_short_batches():
    case = Case(Classifier, lambda: row_loader((8, 3, 1)), {"schedule": make("1f1b", 2, 4)})
    assert_parity(case, stages=(2,))


def test_fewer_micro_batches_than_stages():
    case = Case(Classifier, lambda: row_loader((8, 5, 1)))
    reference = one_process(case)
    cases = [case.but({"num_microbatches": m, "schedule": s}) for m in (1, 2, 3) for s in ("1f1b", "gpipe", "naive")]
    for records in many_on_stages(cases, 4):
        assert_same(records, reference)


def stage_names(trainer: Trainer, module: LightningModule) -> list[str]:
    return [unit.name for unit in trainer.strategy.pipeline.cut.layout.units if unit.stage == trainer.strategy.stage]


class Uneven(Classifier):
    """One layer is far larger than the others."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Linear(WIDTH, 40), nn.Linear(40, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
            )
        )
        self.example_input_array = torch.zeros(2, WIDTH)


def test_every_partition():
    case = Case(Uneven, row_loader, at_end=stage_names)
    reference = one_process(case.but(at_end=None))
    expected = {"count": {2, 3}, "parameters": {1}, "flops": {1}, "time": {1, 2, 3, 4}, (4, 1): {4}}
    runs = many_on_stages([case.but({"partition": p if isinstance(p, str) else list(p)}) for p in expected], 2)
    for partition, records in zip(expected, runs, strict=True):
        assert_same(records, reference)
        first = [name for name in records[1].extra if name.startswith("net.")]  # stage 0 lies on the last rank
        assert len(first) in expected[partition], (partition, records[1].extra)


# -- the loss ----------------------------------------------------------------------------------------------------------


class Masked(GPT):
    """A mean over the tokens that are not padding: micro-batches differ in how many they have."""

    def _loss(self, batch: Any) -> Tensor:
        x = batch["input_ids"]
        labels = x[:, 1:].masked_fill(batch["padding"][:, 1:], -100)
        return F.cross_entropy(self(x)[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)


def masked_loader() -> DataLoader:
    g = torch.Generator().manual_seed(3)
    batches = []
    for x in tokens(((8, 8), (8, 10), (6, 8))):
        lengths = torch.randint(2, x.shape[1] + 1, (len(x), 1), generator=g)
        batches.append({"input_ids": x, "padding": torch.arange(x.shape[1])[None] >= lengths})
    return DataLoader(batches, batch_size=None)


def masked() -> LightningModule:
    return with_sgd(Masked(vocabulary=11, context=16, width=16, num_heads=2, num_blocks=4))


def num_labels(batch: Any) -> Tensor:
    return (~batch["padding"][:, 1:]).sum()


def test_a_token_mean_by_its_own_weights_is_one_processs():
    case = Case(masked, masked_loader, {"loss_weight": num_labels}, validate=False)
    assert_parity(case)


def test_a_token_mean_by_rows_is_refused_in_the_first_batch():
    message = failure_of(Case(masked, masked_loader, validate=False))
    assert "micro-batches of [2, 2, 2, 2] rows, weighted by rows, give" in message
    assert "The loss is not a mean over rows. Give PipelineStrategy(loss_weight=lambda batch:" in message


# -- checkpoints and several runs --------------------------------------------------------------------------------------


def test_a_checkpoint_goes_from_two_stages_to_one_process_and_to_four(tmp_path):
    path = tmp_path / "two.ckpt"
    case = Case(
        gpt, token_loader, trainer={"max_epochs": 1}, at_end=lambda trainer, module: trainer.save_checkpoint(path)
    )
    [two] = many_on_stages([case], 2)
    whole = one_process(case.but(trainer={"max_epochs": 2}, at_end=None))
    resumed = case.but(trainer={"max_epochs": 2}, at_end=None, checkpoint=path)
    for records in ([one_process(resumed)], *many_on_stages([resumed], 4)):
        last = records[0]
        assert torch.equal(last.initial["head.weight"], two[0].weights["head.weight"])
        assert len(last.losses) == 3
        rest = [*whole.losses[:3], *last.losses]
        torch.testing.assert_close(torch.stack(rest), torch.stack(whole.losses), rtol=2e-5, atol=2e-6)
        last.losses, last.metrics, last.lrs = whole.losses, whole.metrics, whole.lrs
        assert_same([last], whole, leave_out=KEY_BIAS)


def test_a_checkpoint_is_one_processs(tmp_path):
    path = tmp_path / "two.ckpt"
    case = Case(gpt, token_loader, at_end=lambda trainer, module: trainer.save_checkpoint(path))
    many_on_stages([case], 2)
    ours = torch.load(path, weights_only=False)
    one_process(case)
    theirs = torch.load(path, weights_only=False)
    assert ours.keys() == theirs.keys()
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
    assert ours["optimizer_states"][0]["state"].keys() == theirs["optimizer_states"][0]["state"].keys()
    plain = GPT.load_from_checkpoint(path)
    assert plain.head.weight is plain.embedding.weight


def test_a_checkpoint_can_be_saved_after_fit(tmp_path):
    path = tmp_path / "after_fit.ckpt"
    case = Case(Classifier, row_loader, after=lambda trainer, module: trainer.save_checkpoint(path))
    [records] = many_on_stages([case], 2)
    assert torch.load(path)["state_dict"].keys() == records[0].weights.keys()


def validated(trainer: Trainer, module: LightningModule) -> list[dict]:
    results = [trainer.validate(module, row_loader((6, 8)), verbose=False)]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, row_loader(), row_loader((5,)))
    results += [all_metrics(trainer), trainer.validate(module, row_loader((3,)), verbose=False)]
    return results


def test_fit_validate_fit_validate_in_one_process():
    case = Case(Talkative, row_loader, trainer={"max_epochs": 2}, after=validated)
    reference = one_process(case)
    for num_stages in (2, 4):
        [records] = many_on_stages([case], num_stages)
        for record in records:
            for ours, theirs in zip(record.extra, reference.extra, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
