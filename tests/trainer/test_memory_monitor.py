"""MemoryMonitor in real Trainers, with a pipeline and without: bytes by hand, and nothing learnt otherwise."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.callbacks import MemoryMonitor
from lightning_parallel.pipeline.schedules import make
from lightning_parallel.pipeline.simulator import peak_activations
from tests.harness import free_port, run_ranks
from tests.trainer.modules import CLASSES, WIDTH, Classifier, chain, row_loader
from tests.trainer.pipelines import Case, assert_ranks_agree, fit, join_as_torchrun, on_stages, one_process

FLOAT, INT = 4, 8
MATRIX, HEAD = (WIDTH * WIDTH + WIDTH) * FLOAT, (WIDTH * CLASSES + CLASSES) * FLOAT  # a layer's parameters
ROW = WIDTH * FLOAT  # of a hidden layer


class WithAdam(Classifier):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Checkpointed(Classifier):
    def forward(self, x):
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def chain_of_pairs():
    """8 blocks of a linear layer and Tanh, two a stage of four, the last one a head without Tanh."""
    pairs = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(7)]
    return nn.Sequential(*pairs, nn.Linear(WIDTH, CLASSES))


def readings(trainer, module):
    (monitor,) = [callback for callback in trainer.callbacks if isinstance(callback, MemoryMonitor)]
    return monitor.reading


def watched(make=lambda: WithAdam(chain_of_pairs()), rows=16, schedule="1f1b", microbatches=8, **trainer):
    return Case(
        make,
        lambda: row_loader([rows] * 3),
        {"schedule": schedule, "num_microbatches": microbatches, "partition": "count"},
        {"callbacks": lambda: [MemoryMonitor()], **trainer},
        validate=False,
        at_end=readings,
    )


def saved_by_hand(rows):
    """What each of four stages saves for a micro-batch: what came in (the batch counts elsewhere) and Tanhs' outputs.

    The last one also saves the log-softmax that the loss goes back through, and the number that it is divided by.
    """
    first, middle = 2 * rows * ROW, 3 * rows * ROW
    return [first, middle, middle, 2 * rows * ROW + rows * CLASSES * FLOAT + FLOAT]


@pytest.mark.parametrize(
    ("schedule", "microbatches", "held"),
    [
        ("1f1b", 8, (4, 3, 2, 1)),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("1f1b", 2, (2, 2, 2, 1)), ("gpipe", 8, (8, 8, 8, 8)), ("naive", 4, (1, 1, 1, 1)))
        ),
    ],
)
def test_stages_hold_the_activations_that_the_schedule_says(schedule, microbatches, held):
    records = on_stages(watched(schedule=schedule, microbatches=microbatches), 4)
    assert_ranks_agree(records)
    reading = records[0].extra
    assert all(record.extra == reading for record in records)
    per_microbatch = saved_by_hand(16 // microbatches)
    for stage, rank in enumerate((3, 2, 1, 0)):
        memory = reading.ranks[rank]
        assert memory.saved == microbatches * per_microbatch[stage]
        assert memory.held == memory.peak["activations"] == held[stage] * per_microbatch[stage]
        assert memory.current["activations"] == 0
        assert reading.microbatches_held(rank) == pytest.approx(reading.promises[rank].activations) == held[stage]


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="where PyTorch tells nothing of a saved tensor's hooks, products come with I while they are watched",
)
@pytest.mark.parametrize("schedule", [pytest.param("zb_h1", marks=pytest.mark.slow), "zb_h2"])
def test_between_i_and_w_only_the_factors_of_products_stay(schedule):
    """Of what a stage saves, W needs the inputs of its linear layers: what came in (not the batch), a Tanh's output."""
    reading = on_stages(watched(schedule=schedule), 4)[0].extra
    rows, per_microbatch = 2, saved_by_hand(2)
    factors = [rows * ROW, 2 * rows * ROW, 2 * rows * ROW, 2 * rows * ROW]
    for stage, rank in enumerate((3, 2, 1, 0)):
        share = factors[stage] / per_microbatch[stage]
        most = peak_activations(make(schedule, 4, 8), weight_share=share)[stage]
        assert reading.ranks[rank].held == pytest.approx(most * per_microbatch[stage]), (stage, most, share)
        assert reading.ranks[rank].current["activations"] == 0
    whole = peak_activations(make(schedule, 4, 8))
    assert any(reading.microbatches_held(rank) < whole[3 - rank] for rank in range(4))


def test_stages_hold_their_own_parameters_and_states():
    record = on_stages(watched(), 4)[0]
    for stage, rank in enumerate((3, 2, 1, 0)):
        parameters, tensors = (2 * MATRIX, 4) if stage < 3 else (MATRIX + HEAD, 4)
        current = record.extra.ranks[rank].current
        assert current["parameters"] == current["gradients"] == parameters
        assert current["optimizer"] == 2 * parameters + tensors * FLOAT  # Adam's moments, and its counts of steps
        assert current["buffers"] == 0
        assert current["other"] == 16 * (ROW + INT)  # the batch, which every rank has
    metrics = record.metrics[-1]
    assert metrics["logged/parallel/memory_parameters"] == 2 * MATRIX
    assert metrics["logged/parallel/memory_peak"] == max(memory.peak_bytes for memory in record.extra.ranks.values())
    assert metrics["logged/parallel/memory_activations_microbatches/rank_3"] == pytest.approx(4)
    assert metrics["logged/parallel/memory_activations_microbatches_expected/rank_3"] == 4


def test_buffers_count_where_they_are():
    class Normed(WithAdam):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), chain(1), nn.Linear(3, 3)))

    ranks = on_stages(watched(Normed), 2)[0].extra.ranks
    assert [ranks[rank].current["buffers"] for rank in (1, 0)] == [2 * ROW + INT, 0]


def test_a_short_batch_is_compared_with_its_own_schedule():
    case = watched().but(loader=lambda: row_loader([16, 16, 3]))  # 3 rows are 3 micro-batches
    reading = on_stages(case, 4)[0].extra
    assert reading.schedule.num_microbatches == 3
    for rank, held in zip((3, 2, 1, 0), (3, 3, 2, 1), strict=True):
        assert reading.microbatches_held(rank) == reading.promises[rank].activations == held


def test_gradients_that_accumulate_are_held_twice_while_a_pipeline_runs():
    case = watched(accumulate_grad_batches=2, max_steps=2).but(loader=lambda: row_loader([16] * 4))
    for rank, memory in on_stages(case, 4)[0].extra.ranks.items():
        assert memory.current["gradients"] == memory.current["parameters"], rank
        assert memory.peak["gradients"] == 2 * memory.current["parameters"], rank


def test_checkpointed_blocks_hold_their_inputs():
    reading = on_stages(watched(lambda: Checkpointed(chain_of_pairs())), 4)[0].extra
    rows = 2
    inputs = [rows * ROW, 2 * rows * ROW, 2 * rows * ROW, 2 * rows * ROW + rows * CLASSES * FLOAT + FLOAT]
    for stage, rank in enumerate((3, 2, 1, 0)):
        assert reading.ranks[rank].saved == 8 * inputs[stage]
        assert reading.microbatches_held(rank) == pytest.approx(4 - stage)


CASES = {
    "plainly": watched(),
    "clipped": watched(gradient_clip_val=0.1),
    "accumulated": watched(accumulate_grad_batches=2, max_steps=2).but(loader=lambda: row_loader([16] * 4)),
    "checkpointed": watched(lambda: Checkpointed(chain_of_pairs())),
    "in bf16": watched(precision="bf16-mixed"),
}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=[pytest.mark.slow] if stages == 2 and name in ("plainly", "in bf16") else [])
        for name in CASES
        for stages in (1, 2)
    ],
)
def test_the_same_is_learnt_with_and_without(name, stages):
    def run(case):
        return [one_process(case)] if stages == 1 else on_stages(case, stages)

    with_monitor = run(CASES[name])
    without = run(CASES[name].but(trainer={"callbacks": lambda: []}, at_end=None))
    for ours, theirs in zip(with_monitor, without, strict=True):
        assert torch.equal(torch.stack(ours.losses), torch.stack(theirs.losses))
        assert all(torch.equal(ours.weights[key], value) for key, value in theirs.weights.items())
        assert "logged/parallel/memory_peak" in ours.metrics[-1]


def test_one_process_by_hand():
    reading = one_process(watched()).extra
    parameters, batch = 7 * MATRIX + HEAD, 16 * (ROW + INT)
    assert reading.ranks[0].current == {
        "parameters": parameters,
        "buffers": 0,
        "optimizer": 2 * parameters + 16 * FLOAT,
        "gradients": parameters,
        "activations": 0,
        "other": batch,
    }
    assert reading.ranks[0].peak["activations"] == 7 * 16 * ROW + 16 * CLASSES * FLOAT + FLOAT
    assert reading.schedule is None


def test_copies_of_a_pipeline_are_all_read():
    case = watched(microbatches=4).but(strategy={"data_parallel_size": 2})
    records = on_stages(case, 4)
    reading = records[0].extra
    assert all(record.extra == reading for record in records)
    assert reading.in_order == [1, 3, 0, 2]
    for rank, stage in ((1, 0), (3, 0), (0, 1), (2, 1)):
        assert reading.ranks[rank].current["parameters"] == (4 * MATRIX, 3 * MATRIX + HEAD)[stage]
        assert reading.microbatches_held(rank) == pytest.approx(2 - stage)


def test_ranks_without_a_pipeline_are_read_too():
    def run(rank, port):
        join_as_torchrun(rank, 2, port)
        return fit(watched(), "ddp", 2)

    ours, theirs = run_ranks(run, 2, free_port(), group=False)
    assert ours.extra == theirs.extra
    assert list(ours.extra.ranks) == [0, 1]
    assert ours.extra.ranks[1].current["parameters"] == 7 * MATRIX + HEAD
    assert ours.metrics[-1]["logged/parallel/memory_peak/rank_1"] == ours.extra.ranks[1].peak_bytes


class SeesHooks(WithAdam):
    """Remembers, for every step, whether hooks on saved tensors and on gradients were there."""

    def __init__(self):
        super().__init__(chain(2))
        self.seen = []

    def training_step(self, batch, batch_idx):
        saved = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        gradients = bool(self.net[0].weight._post_accumulate_grad_hooks)
        assert saved == gradients
        self.seen.append(saved)
        return super().training_step(batch, batch_idx)


def run_alone(module, monitor, tmp_path=None, steps=7, loader=None, **options):
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, callbacks=[monitor], default_root_dir=tmp_path, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **{"logger": False, "limit_val_batches": 0, **options},
    )  # fmt: skip
    loader = loader or row_loader([4] * steps)
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.parametrize(
    ("monitor", "options", "watched_batches"),
    [
        (MemoryMonitor(), {"log_every_n_steps": 3}, [2, 5, 6]),  # the last one too
        (MemoryMonitor(every_n_steps=2), {"log_every_n_steps": 50}, [1, 3, 5, 6]),
        (MemoryMonitor(), {"log_every_n_steps": 0}, [6]),
        (MemoryMonitor(every_n_steps=4, activations=True), {"steps": -1, "max_epochs": 1, "n": 5}, [3, 4]),
    ],
)
def test_hooks_exist_in_steps_that_log_and_in_the_last(monitor, options, watched_batches):
    module, options = SeesHooks(), dict(options)
    loader = row_loader([4] * options.pop("n", 7))
    run_alone(module, monitor, loader=loader, **options)
    assert [batch for batch, seen in enumerate(module.seen) if seen] == watched_batches
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_every_batch_towards_a_step_that_logs_is_watched():
    module = SeesHooks()
    run_alone(module, MemoryMonitor(every_n_steps=2), steps=3, loader=row_loader([4] * 6), accumulate_grad_batches=2)
    assert module.seen == [False, False, True, True, True, True]


def test_every_logger_gets_the_bytes(tmp_path):
    loggers = [CSVLogger(tmp_path, name=name) for name in ("one", "two")]
    run_alone(WithAdam(chain(2)), MemoryMonitor(), tmp_path, logger=loggers, log_every_n_steps=3)
    for logger in loggers:
        with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
            rows = {int(row["step"]): row for row in csv.DictReader(file) if row.get("parallel/memory_peak")}
        assert list(rows) == [2, 5, 7]  # as Lightning counts them; the last one when the training ended
        assert {float(row["parallel/memory_parameters"]) for row in rows.values()} == {MATRIX + HEAD}


class Large(WithAdam):
    """16 MiB and 4 bytes of parameters: single precision does not know how many bytes that is."""

    def __init__(self):
        super().__init__(chain(2))
        self.more = nn.Parameter(torch.zeros(2**22 + 1))


def test_large_numbers_of_bytes_are_logged_exactly():
    trainer = run_alone(Large(), MemoryMonitor(every_n_steps=1), steps=1)
    logged = trainer.callback_metrics["parallel/memory_parameters"]
    assert int(logged) == 2**24 + FLOAT + MATRIX + HEAD


def test_a_failing_step_leaves_no_hooks():
    class Fails(SeesHooks):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise ValueError("the user's own")

    module = Fails()
    with pytest.raises(ValueError, match="the user's own"):
        run_alone(module, MemoryMonitor(every_n_steps=1))
    assert module.seen == [True]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not module.net[0].weight._post_accumulate_grad_hooks


class WithFunc(WithAdam):
    """A step with a gradient of its own, by ``torch.func``."""

    def training_step(self, batch, batch_idx):
        slope = torch.func.grad(lambda x: x.square().sum())(batch[0]).mean()
        return self.loss(batch) + 0 * slope


def test_a_step_with_torch_func_has_a_remedy():
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        run_alone(WithFunc(chain(2)), MemoryMonitor(every_n_steps=1))
    monitor = MemoryMonitor(every_n_steps=1, activations=False)
    run_alone(WithFunc(chain(2)), monitor)
    assert monitor.reading.ranks[0].peak["gradients"] == MATRIX + HEAD
    assert monitor.reading.ranks[0].peak["activations"] == 0


class TwoOptimizers(Classifier):
    """Manual optimization, two steps a batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.net[0], self.net[2])]


def test_manual_optimization_with_two_optimizers_is_measured():
    monitor = MemoryMonitor(every_n_steps=4)
    trainer = run_alone(TwoOptimizers(chain(2)), monitor, steps=6, loader=row_loader([4] * 3))
    assert trainer.global_step == monitor.reading.step == 6
    assert monitor.reading.ranks[0].current["optimizer"] == MATRIX + HEAD
    assert monitor.reading.ranks[0].peak["activations"] == 4 * ROW + 4 * CLASSES * FLOAT + FLOAT


def test_the_picture_and_the_summary_are_of_the_last_step(tmp_path):
    monitor = MemoryMonitor(picture=tmp_path / "new" / "memory.png")
    assert monitor.summary() == "memory: no step was measured"
    run_alone(WithAdam(chain(2)), monitor)
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert monitor.summary().startswith("memory peak 1.27 KiB on rank 0 in step 7: parameters 252 B")


def test_a_pipeline_draws_on_rank_0(tmp_path):
    path = tmp_path / "memory.png"
    record = on_stages(watched().but(trainer={"callbacks": lambda: [MemoryMonitor(picture=path)]}), 2)[0]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert record.extra.summary().endswith("beside 1, 2 by the schedule (1f1b, 2 stages, 8 micro-batches)")


def test_a_number_of_steps_below_one_is_refused():
    with pytest.raises(ValueError, match=r"MemoryMonitor\(every_n_steps=0\) needs 1 or more"):
        MemoryMonitor(every_n_steps=0)


def test_tied_weights_count_on_every_stage_that_keeps_them():
    class Tied(WithAdam):
        def __init__(self):
            super().__init__(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]))
            self.net[3].weight = self.net[0].weight

        def loss(self, batch):
            return self(batch[0]).square().mean()

    records = on_stages(watched(lambda: Tied()), 2)[0]
    assert [records.extra.ranks[rank].current["parameters"] for rank in (1, 0)] == [2 * MATRIX, 2 * MATRIX]
    assert one_process(watched(lambda: Tied())).extra.ranks[0].current["parameters"] == 4 * MATRIX - WIDTH**2 * FLOAT
