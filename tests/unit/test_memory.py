"""What a step takes, byte by byte, against numbers worked out by hand; no Trainer."""

import gc

import pytest
import torch
from matplotlib.image import imread
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_parallel.demo import GPT
from lightning_parallel.measure.ledger import Ledger
from lightning_parallel.measure.memory import CATEGORIES, MemoryMeter, RankMemory
from lightning_parallel.measure.memory_picture import draw_memory
from lightning_parallel.measure.memory_reading import ExpectedActivations, MemoryReading
from lightning_parallel.measure.palette import MEMORY
from lightning_parallel.measure.storages import count_bytes
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.schedules import make
from tests.unit.test_pictures import channels, colours_of

FLOAT, ROWS = 4, 7
PARAMETERS = ((6 * 5 + 5) + (5 * 4 + 4) + (4 * 3 + 3)) * FLOAT
BATCH = ROWS * 6 * FLOAT
TANH_OUTPUTS = (ROWS * 5 + ROWS * 4) * FLOAT  # each is what Tanh saves and what the next Linear saves


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def ledger_of(model, batch, **options):
    seen = set()
    count_bytes([*model.parameters(), *model.buffers(), batch], "cpu", seen)
    return Ledger(model.parameters(), seen, "cpu", **options)


def hooks_are_on():
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def test_memory_counts_once_however_it_is_viewed():
    matrix = torch.zeros(3, 5)
    assert count_bytes([matrix.t(), matrix[1:], nn.Parameter(matrix)], "cpu", set()) == 15 * FLOAT


def test_a_sparse_gradient_counts_its_indices_and_values():
    table = nn.Embedding(100, 5, sparse=True)
    table(torch.tensor([3, 8])).sum().backward()
    assert count_bytes([table.weight.grad], "cpu", set()) == 2 * 8 + 2 * 5 * FLOAT


def test_what_other_stages_hold_counts_nothing():
    like, cpu = nn.Parameter(torch.zeros(3)), torch.device("cpu")
    foreign = ForeignParameter(like, cpu, "layer.weight", (1,))
    phantom = Phantom(torch.zeros(3, device="meta"), cpu, "an output")
    assert count_bytes([foreign, phantom, torch.zeros(9, device="meta")], "cpu", set()) == 0


def test_activations_are_what_backwards_need_and_go_as_they_run():
    model, batch = network(), torch.randn(ROWS, 6)
    with ledger_of(model, batch) as ledger:
        loss = model(batch).sum()
        assert ledger.live == {"gradients": 0, "activations": TANH_OUTPUTS}
        loss.backward()
        assert ledger.live == {"gradients": PARAMETERS, "activations": 0}
    assert ledger.peak == {"gradients": PARAMETERS, "activations": TANH_OUTPUTS}
    assert ledger.awaited() == (TANH_OUTPUTS, TANH_OUTPUTS)
    # The last layer's gradients are made before autograd drops what the layer before saved.
    assert sum(ledger.at_peak.values()) == TANH_OUTPUTS + (4 * 3 + 3) * FLOAT


def test_the_sum_of_two_peaks_is_not_the_peak():
    model, batch = network(), torch.randn(ROWS, 6)
    with ledger_of(model, batch) as ledger:
        model(batch).sum().backward()
    assert max(ledger.peak.values()) < sum(ledger.at_peak.values()) < sum(ledger.peak.values())


def test_the_allocator_counts_the_same_activations():
    model = GPT(width=32, context=16, num_blocks=2)
    batch = {"input_ids": torch.randint(256, (4, 16))}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        loss = model._loss(batch)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.events())
    with ledger_of(model, batch["input_ids"]) as ledger:
        again = model._loss(batch)
    assert allocated - loss.nbytes == ledger.live["activations"] > 1e5
    del again


@pytest.mark.parametrize("held", [1, 3])
def test_every_forward_that_waits_for_its_backward_holds_its_activations(held):
    model, batch = network(), torch.randn(ROWS, 6)
    with ledger_of(model, batch) as ledger:
        losses = []
        for _ in range(6):
            losses.append(model(batch).sum())
            if len(losses) == held:
                losses.pop(0).backward()
        for loss in losses:
            loss.backward()
    assert ledger.peak["activations"] == held * TANH_OUTPUTS
    assert ledger.awaited() == (held * TANH_OUTPUTS, 6 * TANH_OUTPUTS)


def test_a_graph_that_is_thrown_away_lets_go():
    model, batch = network(), torch.randn(ROWS, 6)
    with ledger_of(model, batch) as ledger:
        loss = model(batch).sum()
        del loss
        gc.collect()
        assert ledger.live["activations"] == 0
    assert ledger.peak["activations"] == TANH_OUTPUTS
    assert ledger.awaited() == (0, 0)


def test_checkpointing_keeps_the_inputs_only():
    model, batch = network(), torch.randn(ROWS, 6, requires_grad=True)
    with ledger_of(model, batch) as ledger:
        middle = checkpoint(model[:2], batch, use_reentrant=False)
        loss = checkpoint(model[2:], middle, use_reentrant=False).sum()
        assert ledger.live["activations"] == ROWS * 5 * FLOAT
        loss.backward()
        assert ledger.live["activations"] == 0
    assert ledger.awaited() == (ROWS * 5 * FLOAT, ROWS * 5 * FLOAT)


def test_what_a_reentrant_recomputation_saves_was_not_awaited():
    model, batch = network(), torch.randn(ROWS, 6, requires_grad=True)
    with ledger_of(model, batch) as ledger:
        loss = model[4](checkpoint(model[:4], batch, use_reentrant=True)).sum()
        assert ledger.live["activations"] == ROWS * 4 * FLOAT
        loss.backward()
    assert ledger.peak["activations"] == TANH_OUTPUTS
    assert ledger.awaited() == (ROWS * 4 * FLOAT, ROWS * 4 * FLOAT)


def test_gradients_set_aside_count_until_they_are_freed():
    model, batch = network(), torch.randn(ROWS, 6)
    model(batch).sum().backward()
    with ledger_of(model, batch) as ledger:
        aside = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        assert ledger.live["gradients"] == PARAMETERS
        model(batch).sum().backward()
        assert ledger.live["gradients"] == 2 * PARAMETERS
        aside.clear()
        assert ledger.live["gradients"] == PARAMETERS
    assert ledger.peak["gradients"] == 2 * PARAMETERS


def test_a_write_into_a_saved_tensor_raises_as_it_does_without_hooks():
    def wrong_step():
        hidden = model[:2](batch)
        loss = hidden.square().sum()
        hidden.add_(1)
        loss.backward()

    model, batch = network(), torch.randn(ROWS, 6)
    message = "needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        wrong_step()
    with ledger_of(model, batch), pytest.raises(RuntimeError, match=message):
        wrong_step()


def test_hooks_go_with_the_step():
    model, batch = network(), torch.randn(ROWS, 6)
    with ledger_of(model, batch) as ledger:
        assert hooks_are_on()
    assert not hooks_are_on()
    model(batch).sum().backward()
    assert ledger.peak == {"gradients": 0, "activations": 0}
    with ledger_of(model, batch, activations=False):
        assert not hooks_are_on()


def step(meter, model, optimizer, batch):
    meter.begin(batch)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    return meter.end(batch)


class FakeAllocator:
    """Says what it was told to; knows whether its peak was forgotten."""

    def __init__(self, in_use, most):
        self.answer, self.begun = (in_use, most), 0

    def begin(self):
        self.begun += 1

    def read(self):
        return self.answer


def test_a_step_of_adam_by_hand():
    model, batch = network(), torch.randn(ROWS, 6)
    model.register_buffer("mean", torch.zeros(11))
    optimizer = torch.optim.Adam(model.parameters())
    meter = MemoryMeter(model, [optimizer], torch.device("cpu"))
    first, second = (step(meter, model, optimizer, batch) for _ in range(2))
    states = 2 * PARAMETERS + 6 * FLOAT  # two moments, and each parameter's own count of steps
    standing = {"parameters": PARAMETERS, "buffers": 11 * FLOAT, "optimizer": states}
    ended = {**standing, "gradients": PARAMETERS, "activations": 0, "other": BATCH}
    assert first.current == second.current == ended
    assert list(second.current) == list(second.peak) == list(second.at_peak) == list(CATEGORIES)
    assert second.peak == {**ended, "activations": TANH_OUTPUTS}
    # Adam made its states when the activations had gone: in the first step that is the fullest moment, or it is not.
    assert first.at_peak == ended


def test_a_step_of_large_activations_is_fullest_in_its_backward():
    model, batch = network(), torch.randn(10 * ROWS, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = MemoryMeter(model, [optimizer], torch.device("cpu"))
    first, second = (step(meter, model, optimizer, batch) for _ in range(2))
    standing = {"parameters": PARAMETERS, "buffers": 0, "optimizer": PARAMETERS, "other": 10 * BATCH}
    # The last layer's gradients are made before autograd drops what the layer before saved.
    moving = {"gradients": (4 * 3 + 3) * FLOAT, "activations": 10 * TANH_OUTPUTS}
    assert second.at_peak == standing | moving
    assert first.at_peak == second.at_peak | {"optimizer": 0}
    assert second.current == standing | {"gradients": PARAMETERS, "activations": 0}


def test_gradients_put_in_place_of_others_count_at_the_end():
    model, batch = network(), torch.randn(ROWS, 6)
    meter = MemoryMeter(model, [], torch.device("cpu"))
    meter.begin(batch)
    model(batch).sum().backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()
    assert meter.end(batch).current["gradients"] == PARAMETERS


def test_the_allocator_says_the_sums_and_the_rest_is_other():
    model, batch = network(), torch.randn(ROWS, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = step(MemoryMeter(model, [optimizer], torch.device("cpu")), model, optimizer, batch)
    allocator = FakeAllocator(in_use=10_000, most=20_000)
    measured = step(MemoryMeter(model, [optimizer], torch.device("cpu"), allocator), model, optimizer, batch)
    assert allocator.begun == 1
    assert (measured.current_bytes, measured.peak_bytes) == (10_000, 20_000)
    assert measured.current["other"] == 10_000 - counted.current_bytes + BATCH
    assert measured.at_peak["other"] == 20_000 - counted.peak_bytes + BATCH == measured.peak["other"]
    assert measured.peak["activations"] == TANH_OUTPUTS


def test_what_was_not_begun_is_not_measured():
    assert MemoryMeter(network(), [], torch.device("cpu")).end(torch.zeros(1)) is None


def memory(activations, saved, parameters=1000):
    moving = {"gradients": 0, "activations": activations, "other": 24}
    table = {"parameters": parameters, "buffers": 0, "optimizer": 2000, **moving}
    return RankMemory({**table, "activations": 0}, table, table, activations, saved)


def promised(schedule, row_ranks):
    return {rank: ExpectedActivations.of(schedule, row) for row, rank in enumerate(row_ranks)}


SCHEDULE = make("1f1b", 2, 4)
READING = MemoryReading(9, {0: memory(100, 400), 1: memory(200, 400)}, SCHEDULE, promised(SCHEDULE, (1, 0)))


def test_activations_stand_beside_the_schedule_in_micro_batches():
    metrics = READING.metrics()
    key = "parallel/memory_activations_microbatches"
    assert [metrics[f"{key}/rank_{rank}"] for rank in (1, 0)] == [2, 1]
    assert [metrics[f"{key}_expected/rank_{rank}"] for rank in (1, 0)] == [2, 1]
    assert metrics["parallel/memory_activations_peak"] == metrics["parallel/memory_activations_peak/rank_1"] == 200
    assert metrics["parallel/memory_peak"] == metrics["parallel/memory_peak/rank_1"] == 3224
    assert metrics["parallel/memory_current"] == 3024
    assert metrics["parallel/memory_activations"] == 0


def test_the_summary_names_the_fullest_rank_and_the_promise():
    assert READING.summary() == (
        "memory peak 3.15 KiB on rank 1 in step 9: parameters 1000 B, optimizer 1.95 KiB, activations 200 B, "
        "other 24 B\n"
        "activations of 1.00, 2.00 micro-batches at most on ranks 0, 1 beside 1, 2 by the schedule (1f1b, 2 stages, "
        "4 micro-batches)"
    )


def test_without_a_pipeline_there_is_nothing_beside_it():
    alone = MemoryReading(9, {0: memory(100, 400)})
    assert not [key for key in alone.metrics() if "microbatches" in key]
    assert "\n" not in alone.summary()
    with pytest.raises(ValueError, match="no micro-batches to count activations in"):
        alone.microbatches_held(0)


def test_a_stage_without_activations_holds_none():
    schedule = make("gpipe", 1, 4)
    assert MemoryReading(1, {0: memory(0, 0)}, schedule, promised(schedule, (0,))).microbatches_held(0) == 0


def test_the_picture_has_a_bar_a_rank_in_the_colours_of_what_there_is(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    draw_memory(one, MemoryReading(9, {0: memory(100, 400)}))
    draw_memory(two, READING)
    assert imread(two).shape[0] > imread(one).shape[0] + 50
    there = {channels(MEMORY[kind]) for kind in ("parameters", "optimizer", "activations")}
    assert there <= colours_of(two)
    assert channels(MEMORY["buffers"]) not in colours_of(two)
