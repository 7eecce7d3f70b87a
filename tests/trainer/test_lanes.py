"""Lanes of a timeline: what ranks said along each axis in the step, in bytes that follow from the model."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer

from lightning_parallel.callbacks import CommunicationMonitor, TimelineExporter
from lightning_parallel.pipeline.transport.channel import Channel
from tests.harness import free_port, run_ranks
from tests.trainer.hybrids import ROWS, TOKENS, Mesh, gpt, token_loader
from tests.trainer.pipelines import join_as_torchrun, make_trainer

FLOAT = 4  # bytes
VECTOR = ROWS * TOKENS * 16 * FLOAT  # of the hidden states of a step's rows
Times = tuple[list[float], list[float], Any]  # begins and ends of batches, the last one's trace
Lanes = Mapping[int, Mapping[str, list[dict[str, Any]]]]


class Watch(Callback):
    """When this rank's batches began and ended, and the trace of the last."""

    def __init__(self) -> None:
        self.began, self.ended, self.trace = list[float](), list[float](), None

    def on_train_batch_start(self, *args: Any) -> None:
        self.began.append(time.perf_counter())

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended.append(time.perf_counter())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.trace = trainer.strategy.stats.last_trace()


def model() -> Any:
    return gpt(num_heads=4, tie_embeddings=False)


def run_and_read(mesh: Mesh, folder: Path) -> Lanes:
    """Four steps on a mesh; the events of the second's file by global rank and name of the lane."""

    def fitted(rank: int, port: int) -> Times:
        join_as_torchrun(rank, mesh.size, port)
        watch, before = Watch(), dist.all_reduce
        # The monitor listens too, and stops after the exporter.
        callbacks = [watch, TimelineExporter(folder, every_n_steps=3), CommunicationMonitor(every_n_steps=1)]
        trainer = make_trainer(mesh.strategy(), mesh.size, callbacks, limit_val_batches=0, max_steps=4)
        trainer.fit(model(), token_loader(mesh.data, mesh.place(rank)), token_loader())
        assert dist.all_reduce is before
        assert Channel.observer is None
        return watch.began, watch.ended, watch.trace

    assert_in_the_step(run_ranks(fitted, mesh.size, free_port(), group=False))
    steps = ["step_000002.json", "step_000002.png", "step_000004.json", "step_000004.png"]
    assert sorted(path.name for path in folder.iterdir()) == steps
    return by_lane(json.loads((folder / steps[0]).read_text())["traceEvents"])


def assert_in_the_step(watched: list[Times]) -> None:
    """A send ends with its receive, so what one rank shows lies within the batch of all."""
    trace = watched[0][2]
    begin = min(began[trace.step - 1] for began, _, _ in watched)
    end = max(ended[trace.step - 1] for _, ended, _ in watched)
    assert all(trace.lanes)
    for transfer in (transfer for row in trace.lanes for transfer in row):
        assert begin <= transfer.start <= transfer.end <= end


def by_lane(events: Any) -> Lanes:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[int, Any] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] == "X":
            found[event["args"]["rank"]][names[event["pid"], event["tid"]]].append(event)
    return found


def nbytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """Sums by operation."""
    sums: dict[str, int] = defaultdict(int)
    for event in events:
        sums[event["name"]] += event["args"]["bytes"]
    return dict(sums)


def held(last: bool) -> list[int]:
    """Elements of the parameters of the first two of four blocks with the embeddings, or of the rest."""
    later = ("blocks.2", "blocks.3", "norm", "head")
    return [p.numel() for name, p in model().named_parameters() if name.startswith(later) == last]


def assert_stages_exchange(lanes: Lanes, rows: int) -> None:
    """Hidden states go from rank `first` to rank 0 and their gradients back; both show one span."""
    first = max(lanes)
    assert nbytes(lanes[first]["pipeline axis"]) == nbytes(lanes[0]["pipeline axis"]) == {"send": rows, "recv": rows}
    sent, taken = (
        sorted((e["ts"], e["dur"]) for e in lanes[rank]["pipeline axis"] if e["args"]["from"] == first)
        for rank in (first, 0)
    )
    assert sent == taken


def test_a_mesh_of_data_and_pipeline_shows_both_beside_what_ranks_compute(tmp_path):
    lanes = run_and_read(Mesh(2, 2, 1, {"zero_stage": 0}), tmp_path)
    assert set(lanes) == {0, 1}  # the first copy's
    assert_stages_exchange(lanes, VECTOR // 2)  # a copy has half of the rows
    for rank, last in ((0, True), (1, False)):
        assert set(lanes[rank]) == {"compute", "waits for a value", "pipeline axis", "data axis"}
        sizes = held(last)
        votes = len(sizes) + 2  # who has a gradient, is a sum stale, does a copy pause
        assert nbytes(lanes[rank]["data axis"]) == {"all_reduce": (sum(sizes) + votes) * FLOAT}


class Stops(Callback):
    """Ends training in its second validation, as early stopping does."""

    seen = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen += 1
        trainer.should_stop = self.seen >= 2


class TimeIsUp(Timer):
    """An hour has gone by after so many batches; what `max_time` makes is such a callback."""

    def __init__(self, batches: int) -> None:
        super().__init__({"minutes": 59})
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.batches -= 1
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, stage: Any = "train") -> float:
        return 0.0 if self.batches > 0 else 3600.0


ACCUMULATED = {"accumulate_grad_batches": 2}
ENDS: dict[str, tuple[dict[str, Any], list[Callback], list[int]]] = {  # and the batches that are drawn
    "gradients accumulate": ({**ACCUMULATED, "max_epochs": 1}, [], [4, 6]),
    "gradients accumulate until time is up": (ACCUMULATED, [TimeIsUp(3)], [2]),
    "a validation ends it": ({"max_epochs": 2, "val_check_interval": 2}, [Stops()], [1, 3, 4]),
    "time is up": ({}, [TimeIsUp(3)], [1, 3]),
}


@pytest.mark.parametrize(
    "end", ["gradients accumulate", *(pytest.param(e, marks=pytest.mark.slow) for e in [*ENDS][1:])]
)
def test_what_is_drawn_has_what_copies_say_in_it(end: str, tmp_path: Path):
    options, ends, steps = ENDS[end]

    def fitted(rank: int, port: int) -> None:
        join_as_torchrun(rank, 2, port)
        more = {"max_epochs": 1, "limit_val_batches": 1, "use_distributed_sampler": False, **options}
        callbacks = [TimelineExporter(tmp_path, every_n_steps=2), *ends]
        trainer = make_trainer(Mesh(2).strategy(), 2, callbacks, **more)
        trainer.fit(model(), token_loader(2, rank), token_loader())

    run_ranks(fitted, 2, free_port(), group=False)
    files = sorted(tmp_path.glob("*.json"))
    assert [path.name for path in files] == [f"step_{step:06d}.json" for step in steps]
    sums = sum(p.numel() for p in model().parameters()) * FLOAT
    for path in files:
        lanes = by_lane(json.loads(path.read_text())["traceEvents"])
        assert nbytes(lanes[0]["data axis"])["all_reduce"] >= sums, path.name


@pytest.mark.slow
def test_gathers_and_reductions_of_zero_lie_in_the_lane_of_data(tmp_path):
    lanes = run_and_read(Mesh(2, 2, 1, {"zero_stage": 3}), tmp_path)
    for rank, last in ((0, True), (1, False)):
        moved = nbytes(lanes[rank]["data axis"])
        assert moved["reduce_scatter"] == moved["all_gather"] == sum(held(last)) * FLOAT


def test_a_mesh_of_pipeline_and_tensor_shows_both(tmp_path):
    lanes = run_and_read(Mesh(1, 2, 2), tmp_path)
    assert set(lanes) == {0, 2}  # the first line along the tensor axis
    assert_stages_exchange(lanes, VECTOR)
    layers = 2 * 4 * VECTOR  # four all-reduces a layer, two layers a stage
    logits = ROWS * TOKENS * 20 * FLOAT  # 19, padded to what two ranks divide
    assert nbytes(lanes[2]["tensor axis"]) == {"all_reduce": layers + VECTOR}  # the embedding's
    assert nbytes(lanes[0]["tensor axis"]) == {"all_reduce": layers + VECTOR, "all_gather": logits}  # the head's
