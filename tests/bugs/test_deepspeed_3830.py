"""Weights that hooks write: a clamp after a batch never happened, as the optimizer went on from a copy. The kind: any
way in which a hook gives a parameter other values is taken over, or refused in words.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import HybridStrategy, ParameterServerStrategy, PipelineStrategy, ZeROStrategy
from tests.trainer.modules import Classifier, row_dataset
from tests.trainer.pipelines import LOSS, WEIGHTS
from tests.trainer.zeros import Fit, fit, on_ranks

OPTIONS: dict[str, Any] = {"max_steps": 4, "use_distributed_sampler": False, "limit_val_batches": 0}
Make = Callable[[], Any]


class Clamps(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)


class ClampsData(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.2, 0.2)


class Replaces(Classifier):
    """Gives parameters other memory, between a forward and its backward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.data = p.data * 0.9


class ReplacesOnce(Classifier):
    """At a start: what comes after is of the new memory."""

    def on_train_epoch_start(self) -> None:
        for p in self.parameters():
            p.data = p.data.clone() + 0.01


class Loads(Classifier):
    """Loads weights where training starts."""

    def on_train_start(self) -> None:
        self.load_state_dict({name: torch.full_like(v, 0.1) for name, v in Classifier().state_dict().items()})


class Teaches(Classifier):
    """A teacher that follows the parameters, as BYOL's does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.1 * (self.net(batch[0]) - self.teacher(batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                t.mul_(0.5).add_(p, alpha=0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


KINDS: dict[str, type[Classifier]] = {
    kind.__name__: kind for kind in (Clamps, ClampsData, Replaces, ReplacesOnce, Loads, Teaches)
}
TAKE: dict[str, Make] = {
    "zero_1": lambda: ZeROStrategy(stage=1, bucket_mb=1e-4),
    "zero_2": lambda: ZeROStrategy(stage=2),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "zero_2 by fsdp2": lambda: ZeROStrategy(stage=2, engine="fsdp2"),
    "hybrid 1": lambda: HybridStrategy(zero_stage=1),
}


def deepspeed(stage: int) -> Any:
    pytest.importorskip("deepspeed")
    return ZeROStrategy(stage=stage, engine="deepspeed")


def runs(name: str) -> list[tuple[Fit, Make]]:
    left_out = {"zero_3": {Teaches, Replaces}, "hybrid 1": {Replaces}}.get(name, set())
    return [(Fit(kind, OPTIONS), TAKE[name]) for kind in KINDS.values() if kind not in left_out]


@pytest.mark.parametrize(
    "name", [n if n in ("zero_1", "zero_3") else pytest.param(n, marks=pytest.mark.slow) for n in TAKE]
)
def test_taken_over(name: str):
    for (run, _), results in zip(runs(name), on_ranks(runs(name), 2, timeout=58.0), strict=True):
        reference = fit(run, "auto", 1)
        torch.testing.assert_close(
            results[0].losses, reference.losses, **LOSS, msg=lambda t, run=run: f"{run.make}: {t}"
        )
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_taken_over_by_deepspeed(stage: int):
    jobs = [(Fit(kind, OPTIONS), lambda: deepspeed(stage)) for kind in KINDS.values()]
    for (run, _), results in zip(jobs, on_ranks(jobs, 2, timeout=140.0), strict=True):
        reference = fit(run, "auto", 1)
        torch.testing.assert_close(
            results[0].losses, reference.losses, **LOSS, msg=lambda t, run=run: f"{run.make}: {t}"
        )
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)


HALF = {**OPTIONS, "precision": "bf16-true"}
COPIED: dict[str, Make] = {
    "zero_1": lambda: ZeROStrategy(stage=1),
    "hybrid 2": lambda: HybridStrategy(zero_stage=2),
    "zero_3": lambda: ZeROStrategy(stage=3),
    "deepspeed 1": lambda: deepspeed(1),
}


@pytest.mark.parametrize("name", [n if n == "zero_1" else pytest.param(n, marks=pytest.mark.slow) for n in COPIED])
def test_taken_over_by_copies_of_32_bits(name: str):
    """A checkpoint's weights and its copies are the clamped ones."""
    kinds = [Clamps, ReplacesOnce, Loads, *([Replaces] if name in ("zero_1", "deepspeed 1") else [])]
    jobs = [(Fit(kind, HALF), COPIED[name]) for kind in kinds]
    for kind, results in zip(kinds, on_ranks(jobs, 2, timeout=58.0), strict=True):
        reference = fit(Fit(kind, {**OPTIONS}, lambda: row_dataset(40, 4, shuffle=True)), "auto", 1)
        found = {name: value.float() for name, value in results[0].weights.items()}
        torch.testing.assert_close(found, reference.weights, rtol=5e-2, atol=8e-3)
        if kind is Clamps:
            assert max(float(value.abs().max()) for value in found.values()) <= 0.2002


class Wide(Clamps):
    """A layer that DeepSpeed does not keep whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 20000), nn.Tanh(), nn.Linear(20000, 3))


class Reads(Wide):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.net[0].weight.norm() > 0


BETWEEN = r"written to parameters, and under .* or use ZeROStrategy\(stage=1\)"
EMPTY = r'Where hooks read or write parameters use ZeROStrategy\(stage=2, engine="deepspeed"\), or stage=3 with engine'
SERVERS = r"A hook has written to parameters .* Use ZeROStrategy\(stage=1\), which goes on from what hooks write"
PART = "of which zero_stage=3 leaves this rank a part"
servers = lambda: ParameterServerStrategy(start_method="fork")  # noqa: E731
REFUSE: list[tuple[Make, type[Classifier], str]] = [
    (servers, Clamps, SERVERS),
    (lambda: HybridStrategy(zero_stage=3), Clamps, PART),
    (TAKE["zero_3"], Replaces, BETWEEN),
    (TAKE["hybrid 1"], Replaces, BETWEEN),
    (lambda: HybridStrategy(zero_stage=3), Replaces, BETWEEN),
    (lambda: HybridStrategy(zero_stage=3), Teaches, PART),
    (lambda: PipelineStrategy(num_microbatches=2), Clamps, "of stage [01], which this stage does not hold"),
    (lambda: deepspeed(3), Wide, EMPTY),
    (lambda: deepspeed(3), Reads, EMPTY),
    *((servers, kind, SERVERS) for kind in (ClampsData, Replaces, ReplacesOnce, Loads)),
]


CASES = [case if i < 3 else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(REFUSE)]


@pytest.mark.parametrize(("make", "kind", "words"), CASES)
def test_refused_in_words(make: Make, kind: type[Classifier], words: str):
    with pytest.raises(Exception, match=words):
        on_ranks([(Fit(kind, OPTIONS), make)], 2)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_parts_that_are_written_are_taken_over(gather: Any):
    jobs = [
        (Fit(k, OPTIONS), lambda: HybridStrategy(zero_stage=3, gather=gather))
        for k in (ClampsData, ReplacesOnce, Loads)
    ]
    for (run, _), results in zip(jobs, on_ranks(jobs, 2, timeout=58.0), strict=True):
        reference = fit(run, "auto", 1)
        torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)


@pytest.mark.slow
def test_servers_are_read_by_a_teacher():
    reference = fit(Fit(Teaches, OPTIONS), "auto", 1)
    [results] = on_ranks([(Fit(Teaches, OPTIONS), lambda: ParameterServerStrategy(start_method="fork"))], 2)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)


class WritesInside(Classifier):
    """The remedy of Hybrid's stage 3: what is written inside is taken over."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with getattr(self.trainer.strategy, "whole_parameters", nullcontext)(), torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("gather", ["step", pytest.param("microbatch", marks=pytest.mark.slow)])
def test_what_is_written_to_whole_parameters_stays(gather: Any):
    reference = fit(Fit(WritesInside, OPTIONS), "auto", 1)
    [results] = on_ranks([(Fit(WritesInside, OPTIONS), lambda: HybridStrategy(zero_stage=3, gather=gather))], 2)
    torch.testing.assert_close(results[0].losses, reference.losses, **LOSS)
    torch.testing.assert_close(results[0].weights, reference.weights, **WEIGHTS)
