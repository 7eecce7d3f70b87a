"""A block that returned a dict, or None in it, was refused."""

import torch
from torch import Tensor, nn

from tests.trainer.modules import CLASSES, WIDTH, Classifier, row_loader
from tests.trainer.pipelines import Case, assert_parity


class ReturnsADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict) -> dict:
        assert state["aux"] is None and state["name"] == "x" and state["pair"][1] is None
        return {"h": torch.tanh(self.layer(state["h"])), "aux": None, "name": "x", "pair": (state["h"], None)}


class Dicts(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(ReturnsADict() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = {"h": x, "aux": None, "name": "x", "pair": (x, None)}
        for block in self.net:
            state = block(state)
        return self.head(state["h"] + state["pair"][0])


def test_dicts_and_none_go_round():
    assert_parity(Case(Dicts, row_loader))
