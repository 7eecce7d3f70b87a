"""Bytes of model states on every rank of a mesh, beside the paper's formula on the rank's stages."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_parallel.callbacks import CommunicationMonitor, MemoryMonitor
from lightning_parallel.demo.gpt import GPT, Block
from lightning_parallel.measure.memory_reading import STATES
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.zero.accounting import StateBytes, bytes_by_kind
from lightning_parallel.zero.closed_parameters import Closed
from tests.trainer.hybrids import Mesh, gpt_case, on_meshes

ADAM = StateBytes(parameters=4, gradients=4, optimizer=8)  # 32 bits, no copy


def gpt(**options: Any) -> GPT:
    """All sizes are multiples of 32, so that nothing is padded."""
    warnings.filterwarnings("ignore", message=".*save_hyperparameters")
    return GPT(vocabulary=64, context=32, width=32, num_blocks=4, num_heads=2, tie_embeddings=False)


def measured(trainer: Trainer, module: LightningModule) -> tuple[dict[str, float], int, int]:
    """What was logged, the elements of this rank's stages, and in how many buckets they lie."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    own = [parameter for _, parameter in trainer.strategy.pipeline.own]
    states = trainer.strategy._states
    return values, sum(p.numel() for p in own), 0 if states is None else len(states.partition.buckets)


WAYS = [(0, "step"), (1, "step"), (2, "step"), (3, "step"), (3, "microbatch")]


@pytest.fixture(scope="module", params=["zb_v", pytest.param("1f1b", marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest) -> Any:
    """For each way of dividing what its ranks measured in their second step."""
    watched = lambda: [MemoryMonitor(1), CommunicationMonitor(1)]  # noqa: E731
    case = gpt_case(max_steps=2, callbacks=watched).but(make=gpt, at_end=measured)
    options = {"schedule": request.param, "num_microbatches": 2}
    jobs = [(case, Mesh(2, 2, 1, {**options, "zero_stage": stage, "gather": gather})) for stage, gather in WAYS]
    return {way: [record.extra for record in records] for way, records in zip(WAYS, on_meshes(jobs), strict=True)}


def test_states_are_the_formulas_of_a_ranks_stages(answers: Any):
    for (stage, _), ranks in answers.items():
        formula = bytes_by_kind(stage, 2, ADAM)
        for rank, (values, parameters, buckets) in enumerate(ranks):
            held = {kind: values[f"parallel/memory_{kind}/rank_{rank}"] for kind in STATES}
            for kind in STATES:
                assert held[kind] == values[f"parallel/memory_{kind}_expected/rank_{rank}"], (stage, kind)
            # In stage 3 each bucket has the number behind it that closed parameters read.
            assert held["parameters"] - parameters * formula["parameters"] == (4 * buckets if stage == 3 else 0)
            assert held["gradients"] == parameters * formula["gradients"]
        values, parameters, _ = ranks[0]
        both = sum(values[f"parallel/memory_optimizer/rank_{rank}"] for rank in (0, 2))  # who divide a stage
        counters = both - float(2 * parameters * formula["optimizer"])
        assert counters % 4 == 0 and 0 < counters < 4 * 80, "a number of 4 bytes for each piece of a parameter"


def test_gathered_parameters_are_no_activations(answers: Any):
    first, *others = answers.values()
    for rank, (values, _, _) in enumerate(first):
        held = f"parallel/memory_activations_peak/rank_{rank}"
        assert values[held] > 0
        assert {other[rank][0][held] for other in others} == {values[held]}


def test_a_step_moves_the_formulas_bytes_along_the_data_axis(answers: Any):
    """Reduced once a step whatever the micro-batches, and gathered as often as chosen: in P, 2, 2, 2 and 1 + 2 M."""
    for (stage, gather), ranks in answers.items():
        values, parameters, _ = ranks[0]
        if not stage:
            assert values["parallel/communication_moved"] == 0, "sums, which are neither"
            continue
        formula = 4 * parameters * (2 if gather == "step" else 1 + 2 * 2)
        assert values["parallel/communication_moved_formula"] == formula
        assert values["parallel/communication_moved"] == formula


def test_gathered_parameters_count_while_they_are_there(answers: Any, request: pytest.FixtureRequest):
    """Beside the batch: a rank's stages for a step; by block what lies outside of blocks, and two blocks at most.

    A stage of 1F1B has no more here.
    """
    other = {way: ranks[0][0]["parallel/memory_other_peak"] for way, ranks in answers.items()}
    most = 4 * max(parameters for _, parameters, _ in answers[3, "step"])
    assert other[1, "step"] == other[2, "step"] == other[0, "step"]
    assert other[3, "step"] - other[0, "step"] == most
    block = 4 * sum(parameter.numel() for parameter in gpt().blocks[0].parameters())
    gathered = other[3, "microbatch"] - other[0, "step"]
    if request.node.callspec.params["answers"] == "1f1b":
        assert gathered == most
    else:
        assert block <= gathered < most


class Open(Callback):
    """Notes at every call of a block which stages' parameters are whole."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen: list[tuple[int, int, set[int]]] = []
        strategy = trainer.strategy
        stage_of = {unit.name: unit.stage for unit in strategy.pipeline.table.layout.units}
        states = strategy._states

        def note(block: nn.Module, args: Any, result: Any) -> None:
            if isinstance(result, Phantom):  # another stage's run tells hooks of this block too
                return
            whole = {s for b in states.partition.buckets if b.is_open for s in states._stages_of(b)}
            name = next(name for name, part in module.named_modules() if part is block)
            self.seen.append((trainer.global_step, stage_of[name], whole))

        for name, block in module.named_modules():
            if isinstance(block, Block) and stage_of[name] in strategy.stages_held:
                block.register_forward_hook(note)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        own = [parameter for _, parameter in trainer.strategy.pipeline.own]
        assert all(isinstance(parameter, Closed) for parameter in own), "closed between steps"
        with pytest.raises(ValueError, match="`add_` reads parameter"), torch.no_grad():
            own[0].add_(1.0)
        with trainer.strategy.whole_parameters():
            assert not any(parameter.isnan().any() for parameter in own)


def seen(trainer: Trainer, module: LightningModule) -> list[tuple[int, int, set[int]]]:
    return next(callback.seen for callback in trainer.callbacks if isinstance(callback, Open))


def test_stage_3_holds_one_stages_parameters_at_a_time():
    case = gpt_case(callbacks=lambda: [Open()]).but(make=gpt, at_end=seen)
    options = {"zero_stage": 3, "schedule": "zb_v", "num_microbatches": 2}
    ways = ({"gather": "microbatch"}, {"gather": "microbatch", "skip_connections": True}, {"gather": "step"})
    by_microbatch, with_skips, by_step = on_meshes([(case, Mesh(2, 2, 1, {**options, **way})) for way in ways])
    for record in (
        by_microbatch + with_skips
    ):  # in the first step calls are found out and the loss is checked, with all of them
        later = [(stage, whole) for step, stage, whole in record.extra if step]
        assert len({stage for stage, _ in later}) == 2 and all(whole == {stage} for stage, whole in later)
    for record in by_step:
        assert all(whole == {stage for _, stage, _ in record.extra} for _, _, whole in record.extra)


class Sent(Callback):
    """Notes how many buckets are on their way when a step's actions are over."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.counts.append(len(trainer.strategy._states.partition.reducer._ahead))


def sent(trainer: Trainer, module: LightningModule) -> tuple[list[int], int]:
    counts = next(callback.counts for callback in trainer.callbacks if isinstance(callback, Sent))
    return counts, len(trainer.strategy._states.partition.buckets)


@pytest.mark.slow
def test_all_buckets_of_a_ranks_own_leave_before_a_step_ends():
    """None in the first step, which a copy might begin anew; with batches that accumulate, in stage 2 after each."""
    case = gpt_case(callbacks=lambda: [Sent()]).but(make=gpt, at_end=sent)
    options = {"zero_stage": 2, "schedule": "zb_v", "bucket_mb": 0.005}
    jobs = [(case.but(trainer={"accumulate_grad_batches": n}), Mesh(2, 2, 1, options)) for n in (1, 2)]
    for steps, records in zip((3, 6), on_meshes(jobs), strict=True):
        for counts, buckets in (record.extra for record in records):
            assert buckets > 2 and counts == [0] + [buckets] * (steps - 1)
