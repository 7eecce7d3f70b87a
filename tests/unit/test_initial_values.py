"""Initial values of modules without memory are those of one process, after a seed."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.parameters.deferred_init import without_memory
from lightning_parallel.pipeline.parameters.initial_values import drawn_values


class Own(nn.Module):
    """Parameters that were drawn before they were registered, and one that is computed of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(4))
        self.c = nn.Parameter(torch.empty(4, 3))
        with torch.no_grad():
            self.c.copy_(self.a.t() * 2)
            self.b[1:3] = torch.rand(2)


def gpt_like() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    model[3].weight = model[0].weight

    def initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    return model.apply(initialise)


def initialised(init: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        for layer in model:
            init(layer.weight)
        return model

    return build


def with_generator() -> nn.Module:
    model = nn.Linear(3, 3)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(4))
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "convolution and norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GRU(4, 5)),
    "own": Own,
    "initialised at the end, tied": gpt_like,
    "trunc_normal": initialised(lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "orthogonal": initialised(nn.init.orthogonal_),
    "sparse": initialised(lambda w: nn.init.sparse_(w, 0.5)),
    "xavier": initialised(lambda w: nn.init.xavier_normal_(w, gain=0.5)),
    "generator": with_generator,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_as_drawn_in_one_process(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "PL_GLOBAL_SEED", "3")
    torch.manual_seed(3)
    expected = BUILDS[name]()
    then = torch.rand(2)
    torch.manual_seed(3)
    with without_memory():
        found = BUILDS[name]()
    assert torch.equal(torch.rand(2), then)  # what is drawn next
    state = torch.get_rng_state()
    for (key, whole), parameter in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert parameter.is_meta
        values = drawn_values(parameter)
        assert values is not None
        torch.testing.assert_close(values, whole.detach(), rtol=0.0, atol=0.0, msg=lambda t, key=key: f"{key}: {t}")
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_noted_without_a_seed():
    with without_memory():
        layer = nn.Linear(2, 2)
    assert drawn_values(layer.weight) is None
