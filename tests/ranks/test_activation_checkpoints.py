"""Checkpointed blocks keep their inputs alone, on the host or in parts; gradients are those without, bit for bit."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.measure.ledger import Ledger
from lightning_parallel.measure.storages import key_of
from lightning_parallel.zero.activation_checkpoints import ActivationCheckpoints, ShardedInputs, on_host
from lightning_parallel.zero.collectives import Traffic
from tests.harness import run_ranks

BLOCKS, ROWS, WIDTH = 4, 6, 8
INPUT = 4 * ROWS * WIDTH  # bytes


def blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    )


def gradients(model: nn.Module) -> tuple[list[Tensor], int]:
    """Of one step, and the bytes that its forward had saved for the backward."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    known = {key_of(tensor.untyped_storage()) for tensor in model.parameters()}
    torch.manual_seed(5)
    with Ledger(model.parameters(), known, "cpu") as ledger:
        (model(x) ** 1).sum().backward()
        held = ledger.awaited()[0]
    return [x.grad, *(p.grad for p in model.parameters())], held


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_a_block_keeps_its_input_alone():
    reference, whole = gradients(blocks())
    model = blocks()
    checkpoints = ActivationCheckpoints(model)
    found, held = gradients(model)
    assert_equal(found, reference)
    assert held == (BLOCKS + 1) * INPUT < whole / 2  # and the output, for the power
    checkpoints.remove()
    assert gradients(model)[1] == whole


def test_nothing_is_kept_without_gradients():
    model = blocks()
    ActivationCheckpoints(model, keep=lambda: pytest.fail("a block was checkpointed"))
    with torch.no_grad():
        assert model(torch.zeros(ROWS, WIDTH)).shape == (ROWS, WIDTH)


def test_inputs_wait_on_the_host():
    """On a CPU the host's memory is the device's; what the ledger no longer sees is what waits outside of autograd."""
    reference, _ = gradients(blocks())
    model = blocks()
    ActivationCheckpoints(model, keep=on_host(torch.device("cpu")))
    found, held = gradients(model)
    assert_equal(found, reference)
    assert held == INPUT  # the output, for the power


def in_parts(rank: int, reference: list[Tensor]) -> tuple[list[int], dict[str, int]]:
    model, traffic, kept = blocks(), Traffic(), []

    class Counted(ShardedInputs):
        def _cut(self, tensor: Tensor) -> Any:
            packed = super()._cut(tensor)
            if isinstance(packed, tuple):  # older versions of torch save an empty tensor of their own, too
                kept.append(packed[0].nbytes)
            return packed

    ActivationCheckpoints(model, keep=partial(Counted, None, traffic))
    found, _ = gradients(model)
    assert_equal(found, reference)
    return kept, dict(traffic.nbytes)


def test_equal_inputs_are_kept_in_parts():
    """P_a: half the bytes on each of two ranks, one gather of an input for each block."""
    reference, _ = gradients(blocks())
    for kept, moved in run_ranks(in_parts, 2, reference):
        assert kept == [INPUT / 2] * BLOCKS
        assert moved == {"all_gather": BLOCKS * INPUT}


def odd(rank: int) -> Tensor:
    x = torch.arange(5.0).requires_grad_()
    with ShardedInputs():
        y = (x * x).sum()
    y.backward()
    return x.grad


def test_sizes_that_do_not_divide():
    for gradient in run_ranks(odd, 3):
        assert torch.equal(gradient, 2 * torch.arange(5.0))
