"""torch's L-BFGS on vectors of ranges beside torch's L-BFGS on a tensor: the same points, losses and state."""

import gc

import pytest
import torch

from lightning_parallel.parameter_server import Layout
from lightning_parallel.parameter_server.sandblaster.lbfgs import LocalShards
from lightning_parallel.parameter_server.sandblaster.served_lbfgs import ServedLBFGS, Space, Vector

SIZE = 7


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def begin() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1.2, 1.0, SIZE, dtype=torch.float64))


def torchs(options: dict, steps: int) -> tuple[torch.Tensor, list[float], dict]:
    x = begin()
    optimizer, losses = torch.optim.LBFGS([x], **options), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = rosenbrock(x)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return x.detach(), losses, optimizer.state_dict()["state"][0]


class Served:
    """The same on ranges of this process."""

    def __init__(self, options: dict, num_ranges: int, state: dict | None = None, x: torch.Tensor | None = None):
        parameter = begin()
        self.optimizer = torch.optim.LBFGS([parameter], **options)
        self.optimizer.state[parameter].update(state or {})
        start = parameter.detach() if x is None else x
        self.shards = LocalShards(Layout(SIZE, num_ranges).split(start))
        self.served, self.losses = ServedLBFGS(self.optimizer, Space(self.shards), lambda flat: flat), []

    def read(self, name: str) -> torch.Tensor:
        return torch.cat([vectors[name] for vectors in self.shards.vectors])

    def evaluate(self) -> float:
        x = self.read("x").requires_grad_()
        loss = rosenbrock(x)
        loss.backward()
        self.shards.call("zero", "g", "x")
        self.shards.call("add", "g", vector=x.grad)
        self.losses.append(loss.item())
        return loss.item()

    def run(self, steps: int) -> "Served":
        for _ in range(steps):
            self.served.step(self.evaluate)
        return self


OPTIONS = [
    {"lr": 0.01, "max_iter": 5}, {"lr": 0.5, "history_size": 3}, {"line_search_fn": "strong_wolfe"},
    {"lr": 0.7, "line_search_fn": "strong_wolfe", "history_size": 4, "max_iter": 10},
]  # fmt: skip


@pytest.mark.parametrize("num_ranges", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_point_is_torchs(options, num_ranges):
    """In float64, where products over ranges differ in rounding alone."""
    x, losses, state = torchs(options, 4)
    served = Served(options, num_ranges).run(4)
    torch.testing.assert_close(torch.tensor(served.losses), torch.tensor(losses), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(served.read("x"), x, rtol=1e-6, atol=1e-8)
    found = served.served.saved(served.read)
    assert found.keys() == state.keys() and found["n_iter"] == state["n_iter"]
    for name in ("d", "old_dirs", "old_stps", "prev_flat_grad"):
        torch.testing.assert_close(
            found[name],
            [one.float() for one in state[name]] if name[:3] == "old" else state[name].float(),
            rtol=1e-5,
            atol=1e-6,
        )


def test_it_goes_on_from_a_saved_state():
    options = {"lr": 0.5, "max_iter": 3}
    whole = torchs(options, 5)[0]
    x, _, state = torchs(options, 2)
    resumed = Served(options, 2, {k: v for k, v in state.items() if k != "al"}, x).run(3)
    torch.testing.assert_close(resumed.read("x"), whole, rtol=1e-6, atol=1e-8)


def test_vectors_that_nobody_holds_are_dropped():
    served = Served({"history_size": 3, "line_search_fn": "strong_wolfe"}, 2).run(3)
    gc.collect()
    served.served.space.call("max", "x")
    held = {one.name for one in gc.get_objects() if isinstance(one, Vector) and one.space is served.served.space}
    assert served.shards.vectors[0].keys() == {"x", "g", *held} and len(held) <= 2 * 3 + 4


def test_what_torch_does_not_ask_for_is_not_there():
    vector = Space(LocalShards([torch.ones(2)])).copy("x")
    with pytest.raises(NotImplementedError, match="A vector on servers has no"):
        torch.sqrt(vector)
