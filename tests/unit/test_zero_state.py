"""How an optimizer's state is told by number, as in its state dict."""

import torch
from torch import nn

from lightning_parallel.zero.optimizer.state import numbered_groups


def test_groups_are_numbered_as_in_a_state_dict():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    groups = [{"params": part.parameters(), "lr": 0.1 * (i + 1)} for i, part in enumerate(model)]
    optimizer = torch.optim.AdamW(groups)
    assert numbered_groups(optimizer) == optimizer.state_dict()["param_groups"]
    assert [group["params"] for group in numbered_groups(optimizer)] == [[0, 1], [2, 3], [4]]
