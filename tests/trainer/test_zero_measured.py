"""Measured bytes beside the paper's: model states to the byte, padding itemised, and what a step moves."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.callbacks import CommunicationMonitor, MemoryMonitor
from lightning_parallel.demo import GPT
from lightning_parallel.measure.memory_reading import STATES
from lightning_parallel.zero.accounting import StateBytes, bytes_by_kind
from tests.trainer.modules import Classifier, chain, row_dataset, token_loader
from tests.trainer.zeros import STAGES, Fit, on_ranks, zero

MIXED = StateBytes()  # 2 + 2 + 12
ONE_COPY = StateBytes(4, 4, 8)  # stage 3: the 32-bit copy is what is gathered, rounded to 16 bits on its way


class Odd(Classifier):
    """Sizes that no number of ranks divides, and a layer that does not train."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 6).requires_grad_(False), *chain(4)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Even(GPT):
    """All sizes are multiples of 32, so that nothing is padded."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message=".*save_hyperparameters")
        super().__init__(vocabulary=64, context=32, width=32, num_blocks=2, num_heads=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def measured(trainer: Any, module: LightningModule) -> Any:
    memory, communication = (next(c for c in trainer.callbacks if isinstance(c, kind)) for kind in (
        MemoryMonitor, CommunicationMonitor))  # fmt: skip
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trained = [p.numel() for p in module.parameters() if p.requires_grad]
    return values, memory.summary(), communication.summary(), sum(trained)


def run(make: Any, loader: Any, **options: Any) -> Fit:
    callbacks = lambda: [MemoryMonitor(1), CommunicationMonitor(1)]  # noqa: E731
    trainer = {"max_steps": 1, "precision": "bf16-true", "callbacks": callbacks, "limit_val_batches": 0, **options}
    return Fit(make, trainer, loader, measured)


MODELS = {
    "even": (Even, lambda: token_loader(((2, 8),) * 4, vocabulary=64)),
    "odd": (Odd, lambda: row_dataset(40, 4)),
}


TIED = 64 * 32  # the embedding that is the head too: DeepSpeed gathers it for each, in a step's first forward and last


@pytest.fixture(scope="module")
def results() -> Any:
    jobs = [(name, stage) for name in MODELS for stage in STAGES]
    found = {}
    for ranks in (2, 4):
        runs = on_ranks([(run(*MODELS[name]), zero(stage)) for name, stage in jobs], ranks, timeout=58.0)
        found |= {(ranks, *job): answers for job, answers in zip(jobs, runs, strict=True)}
    return found


EVERY = pytest.mark.parametrize(
    ("ranks", "name", "stage"), [(n, name, stage) for n in (2, 4) for name in MODELS for stage in STAGES]
)


@EVERY
def test_states_are_the_formula_s_to_the_byte(results: Any, ranks: int, name: str, stage: int):
    values, _, _, parameters = results[ranks, name, stage][0].extra
    formula = bytes_by_kind(stage, ranks, ONE_COPY if stage == 3 else MIXED)
    for kind in STATES:
        assert values[f"parallel/memory_{kind}_formula"] == float(parameters * formula[kind]), kind
        for rank in range(ranks):
            held = values[f"parallel/memory_{kind}/rank_{rank}"]
            assert held == values[f"parallel/memory_{kind}_expected/rank_{rank}"], (kind, rank)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_added_where_nothing_is_padded(results: Any, ranks: int, stage: int):
    """All ranks together hold N times the formula and the optimizer's step counters, 4 bytes a piece, and no more."""
    values, _, _, parameters = results[ranks, "even", stage][0].extra
    formula = bytes_by_kind(stage, ranks, ONE_COPY if stage == 3 else MIXED)
    held = {kind: sum(values[f"parallel/memory_{kind}/rank_{rank}"] for rank in range(ranks)) for kind in STATES}
    assert held["parameters"] == ranks * parameters * formula["parameters"]
    assert held["gradients"] == ranks * parameters * formula["gradients"]
    counters = held["optimizer"] - float(ranks * parameters * formula["optimizer"])
    pieces = sum(1 for _ in Even().parameters())
    assert counters % 4 == 0 and pieces <= counters / 4 <= ranks * pieces


@EVERY
def test_a_step_moves_what_the_paper_says(results: Any, ranks: int, name: str, stage: int):
    values, _, words, parameters = results[ranks, name, stage][0].extra
    formula = {1: 2, 2: 2, 3: 3}[stage] * 2 * parameters
    assert values["parallel/communication_moved_formula"] == formula
    if name == "even":
        assert values["parallel/communication_moved"] == formula
    else:
        assert formula < values["parallel/communication_moved"] < 2.5 * formula
    assert f"beside {formula} by the formula" in words
    by_phase = {key.removeprefix("parallel/communication_bytes/data/") for key in values if "n_bytes/data" in key}
    gathers = {"all_gather/forward", "all_gather/backward"} if stage == 3 else {"all_gather/step"}
    assert by_phase == {"reduce_scatter/backward"} | gathers
    for where in by_phase:
        assert values[f"parallel/communication_seconds/data/{where}"] > 0
        assert values[f"parallel/communication_seconds_estimate/data/{where}"] > 0


def test_words_of_the_memory_monitor(results: Any):
    _, words, _, _ = results[2, "even", 2][0].extra
    beside = "parameters 55.75 KiB beside 55.75 KiB, gradients 27.88 KiB beside 27.88 KiB, optimizer 167.36 KiB beside"
    assert f"model states on rank 0 beside the formula of stage 2: {beside} 167.25 KiB" in words


@pytest.mark.parametrize(("stage", "moved"), [(1, 2), (2, 5), (3, 12)])
def test_accumulation_moves_nothing_more_in_stage_1(stage: int, moved: int):
    accumulates = run(*MODELS["even"], accumulate_grad_batches=4, max_steps=1, use_distributed_sampler=False)
    [results] = on_ranks([(accumulates, zero(stage))], 2)
    values, _, _, parameters = results[0].extra
    assert values["parallel/communication_moved"] == moved * 2 * parameters
    assert values["parallel/communication_moved_formula"] == moved * 2 * parameters


def test_a_root_that_is_kept_is_gathered_once_less():
    jobs = [(run(*MODELS["even"]), zero(3, keep_root=keep)) for keep in (False, True)]
    freed, kept = ([result.extra for result in results] for results in on_ranks(jobs, 2))
    outside = sum(p.numel() for name, p in Even().named_parameters() if "blocks" not in name)
    moved = [answers[0][0]["parallel/communication_moved"] for answers in (freed, kept)]
    assert moved[0] - moved[1] == 2 * outside
    assert kept[0][0]["parallel/memory_parameters"] == freed[0][0]["parallel/memory_parameters"]


class Deep(Classifier):
    """So many layers of one size, and little else."""

    def __init__(self, layers: int) -> None:
        super().__init__(chain(layers, width=32))
        self.net = nn.Sequential(nn.Linear(6, 32), *self.net)


LAYER = 4 * 32 * 33  # bytes of one layer's gradient


def peaks(bucket_bytes: int) -> list[tuple[float, int]]:
    """The most bytes of gradients in a step of stage 2 on two ranks, and of all parameters, with 8 and 16 layers."""
    runs = [run(lambda n=n: Deep(n), MODELS["odd"][1], precision="32-true") for n in (8, 16)]
    found = []
    for results in on_ranks([(each, zero(2, bucket_mb=bucket_bytes / 2**20)) for each in runs], 2):
        values, _, _, parameters = results[0].extra
        found.append((values["parallel/memory_gradients_peak"], 4 * parameters))
    return found


@pytest.mark.slow
def test_buckets_of_one_size_peak_alike_whatever_the_model_is():
    """C_B of the paper (section 6.2): with constant buffers a deeper model adds its parts, 4P/N, and nothing else."""
    beside = [peak - of_all / 2 for peak, of_all in peaks(LAYER)]
    assert beside[0] == beside[1] and 0 <= beside[0] < LAYER
    for peak, of_all in peaks(64 * LAYER):  # one bucket: whole gradients until the last of them is made
        assert peak == of_all
