"""What may pass from block to block: many kinds of values. Blocks compiled, recomputed, aliased, called again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.trainer.modules import CLASSES, WIDTH, Classifier, Mlp, row_loader
from tests.trainer.pipelines import (
    Case,
    assert_ranks_agree,
    assert_same,
    many_on_stages,
    on_stages,
    one_process,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # double precision: the casts to bfloat16 then round alike
CUT = {"blocks": ["fc1", "fc2", "fc3", "fc4"]}
State = dict[str, Any]


class Carries(nn.Module):
    """Takes and gives a dict of tensors of many kinds, a tuple, a number, a string and None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State, positions: Tensor, *, mask: Tensor, nothing: None = None) -> tuple[State, Tensor]:
        assert nothing is None and state["nothing"] is None and state["tag"] == "a tag"
        assert state["half"].dtype == torch.bfloat16 and not state["across"].is_contiguous()
        (twice, scale), phase = state["pair"], state["phase"]
        h = (
            state["h"]
            + phase.real * phase.imag
            + state["half"] * scale
            + state["across"].t().view(-1).view(len(twice), -1)
            + twice
        )
        h = torch.where(state["even"], h, -h).gather(1, state["order"]) + positions[None] * mask
        return carried(torch.tanh(self.layer(h)), phase), positions.flip(0)


def carried(h: Tensor, phase: Tensor) -> State:
    return {
        "h": h, "phase": phase * torch.polar(torch.ones_like(h), h), "half": h.bfloat16(),
        "even": h > 0.1, "order": h.argsort(1), "across": (h * 0.5).t(),
        "nothing": None, "pair": (h * 2, 0.25), "tag": "a tag",
    }  # fmt: skip


class ManyKinds(Classifier):
    """Blocks that hand on everything; masks and positions made by the step."""

    recomputed = False

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Carries() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        positions, mask = torch.arange(WIDTH), torch.ones_like(h, dtype=torch.bool).cumsum(1) % 2 == 0
        state = carried(h, torch.complex(h, 1 - h))
        for block in self.blocks:
            call = (
                (lambda *a, block=block, **k: checkpoint(block, *a, use_reentrant=False, **k))
                if self.recomputed
                else block
            )
            state, positions = call(state, positions, mask=mask)
        return self.head(state["h"] + state["half"] + state["phase"].real)


class ManyKindsRecomputed(ManyKinds):
    """The user's own checkpointing around every block."""

    recomputed = True


class Layer(nn.Module):
    """A block of a user's own: modules of torch's own are not compiled in place, by torch's rules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Compiled(Classifier):
    """Blocks compiled one by one, in place or by a wrapper."""

    def __init__(self, backend: str, in_place: bool) -> None:
        LightningModule.__init__(self)
        blocks: list[Any] = [Layer() for _ in range(4)]
        if in_place:
            for layer in blocks:
                layer.compile(backend=backend)
        else:
            blocks = [torch.compile(layer, backend=backend) for layer in blocks]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Aliased(Classifier):
    """The same modules under second names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.all = self.net[0], self.net[-1], [self.net]
        self.again = nn.ModuleList(self.net[2:5])


class CallsAgain(Mlp):
    """The first two stages' modules twice in a row, the last one after that; every call drops other numbers."""

    rate = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(self.rate))
        self.fc4 = nn.Sequential(nn.Dropout(self.rate), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x) * self.fc1(-x)
        h = self.fc3(F.relu(self.fc2(h)))
        return self.fc4(h) - self.fc4(-h)


class CallsAgainAndDrops(CallsAgain):
    rate = 0.5


# What travels has not all its rows first, so the loss check cannot join it.
MANY: dict[str, Any] = {"check_loss": False}
DOUBLE = {"precision": "64-true"}
SAME = {
    "many kinds": Case(ManyKinds, row_loader, MANY, DOUBLE),
    "many kinds, dynamic": Case(ManyKinds, row_loader, {**MANY, "dynamic_shapes": True}, DOUBLE),
    "many kinds, checkpointed": Case(ManyKindsRecomputed, row_loader, MANY, DOUBLE),
    "many kinds, recomputed": Case(ManyKinds, row_loader, {**MANY, "recompute": "stage"}, DOUBLE),
    "eager, in place": Case(lambda: Compiled("eager", True), row_loader, trainer=DOUBLE),
    "eager, wrapped": Case(lambda: Compiled("eager", False), row_loader, trainer=DOUBLE),
    "aot_eager, in place": Case(lambda: Compiled("aot_eager", True), row_loader, trainer=DOUBLE),
    "aot_eager, wrapped": Case(lambda: Compiled("aot_eager", False), row_loader, trainer=DOUBLE),
    "aliased": Case(Aliased, row_loader, trainer=DOUBLE),
    "called again": Case(CallsAgain, row_loader, CUT, DOUBLE),
    "called again, a block recomputed": Case(CallsAgain, row_loader, {**CUT, "recompute": "block"}, DOUBLE),
    "called again, a stage recomputed": Case(CallsAgain, row_loader, {**CUT, "recompute": "stage"}, DOUBLE),
}


# torch's compiler asks every tensor for its gradient.
ASKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(scope="module")
def references():
    torch._dynamo.reset()
    return {name: one_process(case) for name, case in SAME.items()}


@ASKS
@pytest.mark.timeout(150)  # sixteen blocks are compiled
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_as_in_one_process(references, num_stages: int):
    torch._dynamo.reset()
    for name, records in zip(SAME, many_on_stages(list(SAME.values()), num_stages, timeout=120.0), strict=True):
        try:
            assert_same(records, references[name], EXACT, EXACT)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@ASKS
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of inductor's own
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on CPUs, and there is no g++ here")
@pytest.mark.parametrize(("in_place", "schedule"), [(True, "zb_h1"), (False, "1f1b")])
def test_blocks_that_inductor_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_place: bool, schedule: str):
    """Kernels of its own, a backward split and one whole; beside one process that compiles nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    case = Case(lambda: Compiled("inductor", in_place), row_loader, {"schedule": schedule}, DOUBLE)
    reference = one_process(case.but(make=lambda: Compiled("eager", in_place)))
    with torch._inductor.config.patch(compile_threads=1):  # no processes behind those of the test
        [records] = many_on_stages([case], 2, timeout=250.0)
    assert_same(records, reference, EXACT, EXACT)
    assert list(tmp_path.rglob("*.so")), "inductor has compiled"


def test_every_call_of_a_module_draws_numbers_of_its_own_on_any_layout():
    case = Case(CallsAgainAndDrops, row_loader, CUT)
    one, two, four = (on_stages(case, num_stages) for num_stages in (1, 2, 4))
    for records in (two, four):
        assert_ranks_agree(records)
        assert torch.equal(torch.stack(records[0].losses), torch.stack(one[0].losses))
        assert all(torch.equal(records[0].weights[name], value) for name, value in one[0].weights.items())
    [recomputed] = many_on_stages([case.but({"recompute": "block"})], 2)
    assert torch.equal(torch.stack(recomputed[0].losses), torch.stack(one[0].losses))
