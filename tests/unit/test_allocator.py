"""When PyTorch is asked for expandable segments: before CUDA starts, and never over a user's decision."""

import pytest
import torch

from lightning_parallel.strategies import ZeROStrategy
from lightning_parallel.zero.allocator import ask_for_expandable_segments

ASKED = "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "after"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": ASKED}), ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"},
        {"PYTORCH_ALLOC_CONF": f"roundup_power2_divisions:4,{ASKED}"}), ({"PYTORCH_ALLOC_CONF":
        "expandable_segments:False"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}), ({"PYTORCH_CUDA_ALLOC_CONF":
        ASKED}, {"PYTORCH_CUDA_ALLOC_CONF": ASKED}), ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
    ],
)  # fmt: skip
def test_before_cuda_starts(given: dict[str, str], after: dict[str, str]):
    environment = dict(given)
    assert ask_for_expandable_segments(environment, started=False) is None
    assert environment == after


def test_too_late():
    environment: dict[str, str] = {}
    assert "set the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True" in str(
        ask_for_expandable_segments(environment, started=True)
    )
    assert environment == {}
    assert ask_for_expandable_segments({"PYTORCH_ALLOC_CONF": ASKED}, started=True) is None


@pytest.mark.parametrize(
    ("device", "wanted", "asked"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_a_strategy_asks_on_gpus(monkeypatch: pytest.MonkeyPatch, device: str, wanted: bool, asked: bool):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # another test may have been on a GPU
    strategy = ZeROStrategy(expandable_segments=wanted, parallel_devices=[torch.device(device, 0)])
    strategy.ask_for_memory(torch.device(device))
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == asked
