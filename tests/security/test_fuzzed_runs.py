"""Runs under every strategy that listens, while a stranger sends what nobody should read to all that they listen on.

Losses and weights are those of an undisturbed run, bit for bit, and no charge goes off.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lightning_parallel.secret import SECRET
from lightning_parallel.strategies import HybridStrategy, ParameterServerStrategy, PipelineStrategy, ZeROStrategy
from tests.harness import free_port, run_ranks
from tests.security.forged import Charge
from tests.security.fuzzed import DAMAGES, GLOO, Sent, UnderFire, stranger
from tests.trainer.hybrids import gpt_case
from tests.trainer.modules import Classifier, row_dataset, row_loader
from tests.trainer.pipelines import Case, Record, fit, join_as_torchrun

FRAMES = int(os.environ.get("FUZZ_FRAMES", "300"))  # a port
MANY = 10_000
STEPS = 3
pytestmark = pytest.mark.timeout(150)


@dataclass(frozen=True)
class Run:
    """What is trained by two ranks, and what listens then."""

    strategy: Callable[[], Any]
    listens: frozenset[str]
    case: Case = field(default_factory=lambda: Case(Classifier, row_loader, validate=False))
    num_nodes: int = 1
    last: str = GLOO  # listens, and is none of the others


OF_RANKS = frozenset({"store", "watch", GLOO})
OF_ONE_HOST = frozenset({"hub's file", "servers' file"})
DEALT = Case(Classifier, lambda: row_dataset(4 * 2 * STEPS, 4), validate=False)  # rows are dealt to the workers
RUNS = {
    "pipeline": Run(lambda: PipelineStrategy(num_microbatches=4), OF_RANKS),
    "zero_2": Run(lambda: ZeROStrategy(stage=2, bucket_mb=1e-4), OF_RANKS),
    "tensor": Run(lambda: HybridStrategy(tensor_parallel_size=2, num_microbatches=4), OF_RANKS, gpt_case()),
    # with restarts, so that the hub listens all the time
    "bsp on one host": Run(lambda: ParameterServerStrategy("bsp", num_servers=2, restarts=1), OF_ONE_HOST, DEALT),
    "bsp between hosts": Run(
        lambda: ParameterServerStrategy("bsp", num_servers=2, restarts=1),
        frozenset({"store", "hub's port", "servers' port"}), DEALT, num_nodes=2, last="hub's port",
    ),
}  # fmt: skip


def train(run: Run, secret: bool, port: int, *more: Any, timeout: float = 140.0) -> list[Record]:
    """The run on two ranks that somebody else has started; one record a rank."""

    def on_rank(rank: int) -> Record:
        join_as_torchrun(rank, 2, port)
        if run.num_nodes == 2:
            os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
        if not secret:
            del os.environ[SECRET]
        warnings.filterwarnings("ignore", message=".*DistributedSampler")
        options = {
            "use_distributed_sampler": run.case is DEALT,
            "num_nodes": run.num_nodes,
            "callbacks": lambda: list(more),
        }
        return fit(run.case.but(trainer=options), run.strategy(), 2 // run.num_nodes)

    return run_ranks(on_rank, 2, group=False, timeout=timeout)


def train_under_fire(run: Run, secret: bool, charge: Charge, frames: int) -> tuple[list[Record], Sent]:
    port = free_port()
    with stranger(charge, port, -(-frames // STEPS), last=run.last) as (line, sent):
        records = train(run, secret, port, UnderFire(line), timeout=140.0 + frames / 5)
    return records, sent


def check(name: str, secret: bool, charge: Charge, frames: int) -> None:
    run = RUNS[name]
    records, sent = train_under_fire(run, secret, charge, frames)
    assert not charge.went_off
    for ours, alone in zip(records, train(run, secret, free_port()), strict=True):
        assert len(ours.losses) == STEPS and torch.equal(torch.stack(ours.losses), torch.stack(alone.losses))
        for mine, theirs in ((ours.weights, alone.weights), (ours.own, alone.own)):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    assert records[0].weights
    assert sent.frames.keys() == run.listens
    assert all(sent.frames[port] >= frames for port in run.listens - {GLOO})
    assert all(sent.damages[damage] for damage in DAMAGES)
    print(name, secret, sent)


CASES = [(name, secret) for name in RUNS for secret in (True, False)]
CASES.remove(("bsp between hosts", False))  # which is refused


@pytest.mark.parametrize(
    ("name", "secret"), [pytest.param(*case, marks=[pytest.mark.slow] * (case != CASES[0])) for case in CASES]
)
def test_a_run_under_fire_is_the_run_alone(name, secret, tmp_path):
    check(name, secret, Charge(tmp_path / "ran"), FRAMES)


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "secret"), CASES)
def test_a_run_under_ten_thousand_frames_is_the_run_alone(name, secret, tmp_path):
    check(name, secret, Charge(tmp_path / "ran"), MANY)
