"""State dicts of modules with compiled parts have the names that they have without."""

import torch
from torch import nn

from lightning_parallel.zero.compiled_names import clean_state_dicts


class Net(nn.Module):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        self.last = nn.Linear(1, 1)
        if compiled:
            self.body[0] = torch.compile(self.body[0], backend="eager")
            self.body = torch.compile(self.body, backend="eager")
            clean_state_dicts(self)
            clean_state_dicts(self)


def test_names_and_order_are_those_without():
    assert list(Net(True).state_dict()) == list(Net(False).state_dict())


def test_both_load_what_the_other_saved():
    plain, compiled = Net(False), Net(True)
    compiled.load_state_dict(plain.state_dict())
    assert torch.equal(compiled.body._orig_mod[0]._orig_mod.weight, plain.body[0].weight)
    plain.load_state_dict(Net(True).state_dict())


def test_what_was_saved_with_the_level_loads_too():
    compiled = Net(True)
    with_level = {f"_orig_mod.{name}": value for name, value in compiled.body._orig_mod[1].state_dict().items()}
    norm = torch.compile(nn.BatchNorm1d(1), backend="eager")
    clean_state_dicts(norm)
    norm.load_state_dict(with_level)
