"""Runs with DeepSpeed as the engine are those under DDP, and none of what it does otherwise by itself is inherited."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies import ZeROStrategy
from lightning_parallel.zero.accounting import StateBytes, bytes_by_kind
from lightning_parallel.zero.deepspeed.setup import DeepSpeedOptions, import_deepspeed
from tests.harness import run_ranks
from tests.trainer.modules import Classifier, row_dataset
from tests.trainer.pipelines import BF16, HALF
from tests.trainer.test_zero import ROUNDED, RUNS, Gan, Logs, LogsUnderSgd
from tests.trainer.test_zero_checkpoints import Small, Trained, WithTests, assert_like, evaluates, run, saves
from tests.trainer.test_zero_measured import MIXED, MODELS, TIED
from tests.trainer.test_zero_measured import run as measured_run
from tests.trainer.zeros import STAGES, Fit, Result, ddp, fit, on_ranks, zero

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

CLOSE = {"bf16-true": BF16, "16-true": HALF}


def deepspeed(stage: int, **options: Any) -> Any:
    return zero(stage, engine="deepspeed", **options)


class ByHand(Classifier):
    """Two backwards a step, and a clip of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, loss = self.optimizers(), self.loss(batch)
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss


class LogsUnderAdam(Logs):
    """What is added before a BatchNorm has a gradient of rounding, of which Adam's usual eps makes whole steps."""

    def configure_optimizers(self) -> Any:
        [optimizer], schedulers = super().configure_optimizers()
        optimizer.param_groups[0]["eps"] = 1e-3
        return [optimizer], schedulers


FITS = {
    "accumulated and clipped": Fit(
        LogsUnderSgd, {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    ),
    "by hand": Fit(ByHand, {"max_epochs": 1}, lambda: row_dataset(48, 4)),
}
EVERY = {
    **FITS, "everything logged": Fit(LogsUnderAdam, {"max_epochs": 2}),
    **{name: RUNS[name] for name in ("bf16-mixed", "16-mixed")},
}  # fmt: skip


def assert_as_under_ddp(theirs: list[Result], ours: list[Result]) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b.losses, a.losses, **ROUNDED)
        torch.testing.assert_close(b.metrics, a.metrics, **ROUNDED)
    torch.testing.assert_close(ours[0].weights, theirs[0].weights, **ROUNDED)


@pytest.mark.parametrize("name", ["accumulated and clipped", pytest.param("by hand", marks=pytest.mark.slow)])
def test_stage_2_as_under_ddp(name: str):
    """SGD shows what Adam hides: gradients that are divided by the number of batches once too often."""
    theirs, ours = on_ranks([(FITS[name], ddp()), (FITS[name], deepspeed(2))], 2)
    assert_as_under_ddp(theirs, ours)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", EVERY)
def test_every_stage_as_under_ddp(name: str):
    jobs = [(EVERY[name], deepspeed(stage, offload=offload)) for stage in STAGES for offload in (False, True)]
    theirs, *ours = on_ranks([(EVERY[name], ddp()), *jobs], 2, timeout=110.0)
    for results in ours:
        assert_as_under_ddp(theirs, results)


@pytest.mark.slow
@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_parameters(stage: int, precision: str, master: bool):
    """As the native engine's, and without a loss scale: Lightning has none for precision="16-true"."""
    options = {"max_epochs": 1, "precision": precision, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    run = Fit(Classifier, options)
    makers = [zero(2, master_weights=master)]
    makers += [deepspeed(stage, offload=offload, master_weights=master) for offload in (False, True)]
    theirs, *ours = on_ranks([(run, make) for make in makers], 2)
    for results in ours:
        torch.testing.assert_close(results[0].losses, theirs[0].losses, **CLOSE[precision])
        torch.testing.assert_close(results[0].weights, theirs[0].weights, **CLOSE[precision])
        assert_same_dtypes(results[0].optimizers[0], theirs[0].optimizers[0])


def assert_same_dtypes(mine: Any, other: Any) -> None:
    kinds = [{v.dtype for fields in one["state"].values() for v in fields.values()} for one in (mine, other)]
    assert len(kinds[0]) == 1 and kinds[0] == kinds[1]


def test_16_bits_where_they_are_not_fast():
    """DeepSpeed refuses float16 on CPUs for which oneDNN has no kernels of its own; PyTorch has others."""

    def on_rank(rank: int) -> bool:
        deepspeed = import_deepspeed(torch.device("cpu"))
        accelerator = deepspeed.accelerator.get_accelerator()
        vars(type(accelerator).is_fp16_supported.__globals__["torch"].ops.mkldnn)["_is_mkldnn_fp16_supported"] = bool
        assert not type(accelerator).is_fp16_supported(accelerator)
        return accelerator.is_fp16_supported()

    assert run_ranks(on_rank, 1, group=False) == [True]


class NotFinite(Classifier):
    """Its second loss on rank 1 is not a number, or infinite."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * self.factor if batch_idx == 1 and self.trainer.global_rank == 1 else loss


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_not_finite_is_not_passed_over(stage: int):
    """DeepSpeed by itself leaves out such a step; under DDP weights show what has happened."""
    runs = [
        Fit(lambda factor=factor: NotFinite(factor), {"max_steps": 2, "limit_val_batches": 0, **options})
        for factor in (float("nan"), float("inf"))
        for options in (
            {}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "precision": "bf16-true"},
            {"precision": "16-true"},
        )
    ]  # fmt: skip
    results = on_ranks([(run, make) for run in runs for make in (ddp(), deepspeed(stage))], 2, timeout=140.0)
    for theirs, ours in zip(results[::2], results[1::2], strict=True):
        assert not all(value.isfinite().all() for value in theirs[0].weights.values())
        torch.testing.assert_close(ours[0].weights, theirs[0].weights, **ROUNDED, equal_nan=True)


class Encoder(Classifier):
    """An encoder of rows with padding, which PyTorch nests in evaluation."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2))
        self.inlet, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(3) > 1 + (x[:, :1] > 0)
        return self.head(self.net(self.inlet(x.unflatten(1, (3, 2))), src_key_padding_mask=padding)[:, 0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_rows_in_evaluations_of_stage_3():
    run = Fit(Encoder, {"max_epochs": 2}, after=lambda _, module: module.net.use_nested_tensor)
    theirs, ours = on_ranks([(run, ddp()), (run, deepspeed(3))], 2)
    assert_as_under_ddp(theirs, ours)
    assert ours[0].extra


@pytest.mark.slow
def test_a_backward_that_nobody_saw():
    class ByItself(ByHand):
        def manual_backward(self, loss: Tensor) -> None:
            loss.backward()

    with pytest.raises(Exception, match=r"made gradients, and DeepSpeed has not reduced them\. Call self\.manual_back"):
        on_ranks([(Fit(ByItself, {"max_epochs": 1, "limit_val_batches": 0}), deepspeed(1))], 2)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted() -> Result:
    return fit(run(4, make=Trained), "auto", 1)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
def test_from_two_ranks_to_one_and_to_four(tmp_path: Path, uninterrupted: Result, stage: int):
    file, folder = tmp_path / "two.ckpt", tmp_path / "two"
    jobs = [(run(2, saves(file), make=Trained), deepspeed(stage))]
    jobs.append((run(2, saves(folder), make=Trained), deepspeed(stage, state_dict_type="sharded")))
    on_ranks(jobs, 2, timeout=110.0)
    assert_like([fit(run(4, resume=file, make=Trained), "auto", 1)], uninterrupted, slice(2, None))
    jobs = [(run(4, resume=file, make=Trained), deepspeed(stage)), (run(4, resume=folder, make=Trained), zero(1))]
    jobs.append((run(4, resume=folder, make=Trained), deepspeed(4 - stage)))
    for results in on_ranks(jobs, 4, timeout=110.0):
        assert_like(results, uninterrupted, slice(2, None))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stage", STAGES)
def test_from_one_process_and_with_copies_of_32_bits(tmp_path: Path, uninterrupted: Result, stage: int):
    fit(run(2, saves(tmp_path / "one.ckpt"), make=Trained), "auto", 1)
    jobs: list[Any] = [(run(4, resume=tmp_path / "one.ckpt", make=Trained), deepspeed(stage))]
    for precision, master in (("bf16-true", True), ("16-true", True), ("bf16-true", False)):
        half, path = {"precision": precision, "make": Small}, tmp_path / f"{precision}-{master}"
        of_halves = (run(4, **half), run(2, saves(path), **half), run(4, resume=path, **half))
        jobs += [(one, deepspeed(stage, master_weights=master)) for one in of_halves]
    resumed, *halves = on_ranks(jobs, 2, timeout=100.0)
    assert_like(resumed, uninterrupted, slice(2, None))
    copies = torch.load(tmp_path / "16-true-True", weights_only=True)["master_weights"]
    assert {value.dtype for value in copies.values()} == {torch.float32}
    assert "master_weights" not in torch.load(tmp_path / "bf16-true-False", weights_only=True)
    for whole, again in zip(halves[::3], halves[2::3], strict=True):
        assert all(torch.equal(again[0].weights[name], value) for name, value in whole[0].weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_saved_after_validate_and_tested(tmp_path: Path, stage: int):
    reference = fit(run(2, evaluates(tmp_path / "one.ckpt"), make=WithTests), "auto", 1)
    [results] = on_ranks([(run(2, evaluates(tmp_path / "two.ckpt"), make=WithTests), deepspeed(stage))], 2)
    for result in results:
        torch.testing.assert_close(result.extra, reference.extra, **ROUNDED)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("master", "of"), [(True, MIXED), (False, StateBytes(2, 2, 2 + 4))])
@pytest.mark.parametrize("stage", STAGES)
def test_states_are_the_formula_s_to_the_byte(stage: int, master: bool, of: StateBytes):
    """Without copies of 32 bits DeepSpeed has some of 16, beside Adam's two."""
    [results] = on_ranks([(measured_run(*MODELS["even"]), deepspeed(stage, master_weights=master))], 2)
    values, _, _, parameters = results[0].extra
    formula = bytes_by_kind(stage, 2, of)
    for kind in ("parameters", "gradients", "optimizer"):
        assert values[f"parallel/memory_{kind}_formula"] == float(parameters * formula[kind])
        for rank in range(2):
            held = values[f"parallel/memory_{kind}/rank_{rank}"]
            assert held == values[f"parallel/memory_{kind}_expected/rank_{rank}"], (kind, rank)


def moved(values: Any) -> dict[str, float]:
    """Bytes along the data axis by collective and phase; broadcasts are DeepSpeed's checks that ranks agree."""
    of = {key.removeprefix("parallel/communication_bytes/data/"): v for key, v in values.items() if "bytes/data" in key}
    return {where: nbytes for where, nbytes in of.items() if nbytes > 100 and not where.startswith("broadcast")}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_moves_what_the_paper_says(ranks: int):
    jobs = [(measured_run(*MODELS["even"], max_steps=3), deepspeed(stage)) for stage in STAGES]
    for stage, results in zip(STAGES, on_ranks(jobs, ranks), strict=True):
        values, _, words, parameters = results[0].extra
        of_a_vector = 2 * parameters
        formula = {1: 2, 2: 2, 3: 3}[stage] * of_a_vector
        assert values["parallel/communication_moved_formula"] == formula
        assert values["parallel/communication_moved"] == formula + (2 * TIED if stage == 3 else 0)
        assert f"beside {formula} by the formula" in words
        seen = moved(values)
        if stage < 3:
            reduces = "reduce/step" if stage == 1 else "reduce/backward"
            assert seen == {reduces: of_a_vector, "all_gather/step": of_a_vector}
        else:
            assert set(seen) == {"reduce_scatter/backward", "all_gather/forward", "all_gather/backward"}
            assert seen["reduce_scatter/backward"] == of_a_vector
        for where in seen:
            assert values[f"parallel/communication_seconds/data/{where}"] > 0
            assert values[f"parallel/communication_seconds_estimate/data/{where}"] > 0


@pytest.mark.slow
def test_deepspeed_left_to_itself_moves_3p(monkeypatch: pytest.MonkeyPatch):
    """Its default for stages 1 and 2 is an all-reduce, which is what this library switches off."""
    ours = DeepSpeedOptions.configuration

    def by_default(options: DeepSpeedOptions, device: Any) -> Any:
        configuration = ours(options, device)
        del configuration["zero_optimization"]["use_multi_rank_bucket_allreduce"]
        return configuration

    monkeypatch.setattr(DeepSpeedOptions, "configuration", by_default)
    jobs = [(measured_run(*MODELS["even"]), deepspeed(stage)) for stage in (1, 2)]
    for results in on_ranks(jobs, 2):
        values, _, _, parameters = results[0].extra
        seen = moved(values)
        reduced = sum(nbytes for where, nbytes in seen.items() if where.startswith("all_reduce/"))
        assert seen["all_gather/step"] == 2 * parameters
        assert 0 <= reduced - 2 * parameters < 100  # a norm and a flag more; an all-reduce counts twice, hence 3P


@pytest.mark.slow
def test_accumulation_moves_nothing_more_in_stage_1():
    accumulates = measured_run(*MODELS["even"], accumulate_grad_batches=4, max_steps=1, use_distributed_sampler=False)
    of_1, of_2 = on_ranks([(accumulates, deepspeed(stage)) for stage in (1, 2)], 2)
    for results, times in ((of_1, 2), (of_2, 5)):
        values, _, _, parameters = results[0].extra
        assert values["parallel/communication_moved"] == times * 2 * parameters
        assert values["parallel/communication_moved_formula"] == times * 2 * parameters


# -- what is refused ---------------------------------------------------------------------------------------------------


class Norms(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm())


class Frozen(Classifier):
    def configure_optimizers(self) -> Any:
        frozen = [p.requires_grad_(False) for p in self.net[0].parameters()]
        return torch.optim.SGD([{"params": self.net[2:].parameters()}, {"params": frozen}], lr=0.1)


class FrozenLater(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx < 2)


class Adds(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


class Adagrad(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters())


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (Norms, {}, "reads a gradient that DeepSpeed holds for itself. Clip with self.clip_gradients(...) or"),
        (Gan, {}, "got 2 optimizers, and DeepSpeed divides the states of one."),
        (Frozen, {}, "nothing in group 1 of SGD requires a gradient, and DeepSpeed divides every group. Leave frozen"),
        (
            FrozenLater,
            {},
            "parameters were frozen or unfrozen while training runs, and DeepSpeed goes on with those of",
        ),
        (Adds, {}, "cannot add a parameter group while training runs: DeepSpeed has divided the others already."),
        (Adagrad, {}, "got Adagrad, in whose place DeepSpeed makes another with one group."),
        (Classifier, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips by norm alone"),
        (Classifier, {"precision": "64-true"}, "runs with precision="),
    ],
)
@pytest.mark.slow
def test_what_is_refused_in_words(make: Any, options: Any, text: str):
    with pytest.raises(Exception) as caught:
        on_ranks([(Fit(make, {"max_epochs": 1, "limit_val_batches": 0, **options}), deepspeed(2))], 2)
    assert text in str(caught.value)


def test_deepspeed_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning-parallel\[deepspeed\]"):
        ZeROStrategy(stage=2, engine="deepspeed")
