"""The peers of a pipeline by name: torch's schedules, and DeepSpeed's PipelineModule, which need not be installed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.torch_peer import PEERS, torch_peer
from lightning_parallel.demo.gpt import GPT

DEEPSPEED = "deepspeed"
NAMES = [*PEERS, DEEPSPEED]


def make_peer(name: str, make: Callable[[], GPT], batch: Tensor, microbatches: int) -> Callable[[], object]:
    """One step of a peer with its optimizer, on this rank."""
    if name != DEEPSPEED:
        return torch_peer(make, name, batch, microbatches)
    from benchmarks.deepspeed_peer import deepspeed_peer

    return deepspeed_peer(make, batch, microbatches)


def peer_of(schedule: str) -> str:
    """Torch's schedule of a name of ours, or its 1F1B."""
    return schedule if schedule in PEERS else "1f1b"


def label(name: str) -> str:
    """What a peer is called in a row."""
    return "DeepSpeed's PipelineModule" if name == DEEPSPEED else f"torch's {name}"
