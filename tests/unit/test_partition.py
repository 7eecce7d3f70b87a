"""Where a model is cut: which modules are blocks, what goes with them, and that the dearest stage is the cheapest."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_parallel.demo.gpt import GPT
from lightning_parallel.pipeline.partition.blocks import find_blocks, unit_names
from lightning_parallel.pipeline.partition.layout import StageLayout, lay_out, min_max_cut
from lightning_parallel.pipeline.partition.shape_inference import shadow_of
from lightning_parallel.pipeline.planning.timing import unit_costs
from lightning_parallel.pipeline.schedules import SCHEDULES, make

BIDIRECTIONAL = ("gems", "chimera", "dualpipe")  # which need two ranks or more


class Transformer(nn.Module):
    """Embedding, blocks, norm and head, as registered by everybody."""

    def __init__(self, num_blocks: int = 4, width: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, width)
        self.drop = nn.Dropout()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 7)


class Outer(nn.Module):
    """A model inside a wrapper, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.inner = Transformer()


def stages_of(layout: StageLayout) -> dict[str, int]:
    return {unit.name: unit.stage for unit in layout.units}


def test_blocks_are_the_largest_chain():
    assert find_blocks(Transformer(), 2) == [f"blocks.{i}" for i in range(4)]
    assert find_blocks(Outer(), 4) == [f"model.inner.blocks.{i}" for i in range(4)]
    mlp = nn.Module()
    mlp.a, mlp.act, mlp.b = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)
    assert find_blocks(mlp, 2) == ["a", "b"]


def test_a_list_is_no_block_but_what_it_holds():
    model = Transformer()
    model.blocks = nn.ModuleList([nn.Linear(4, 4)])
    assert find_blocks(model, 2) == ["emb", "blocks.0", "norm", "head"]
    nested = nn.Module()
    nested.emb, nested.heads = nn.Linear(2, 2), nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)])})
    assert find_blocks(nested, 2) == ["emb", "heads.a.0"]


def test_a_sequential_is_opened_where_blocks_are_too_few():
    model = nn.Module()
    model.emb, model.net, model.head = nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), nn.ReLU()
    assert find_blocks(model, 3) == ["net.0", "net.1", "net.2"]
    assert find_blocks(model, 4) == ["emb", "net.0", "net.1", "net.2"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_how_many_blocks_it_needs_and_what_suffices(name):
    num_stages = make(name, 2, 4).num_stages
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_stages - 1)))
    with pytest.raises(ValueError) as refused:
        lay_out(model, num_stages, num_ranks=2)
    said = str(refused.value)
    each = "" if num_stages == 2 else " (2 on each rank)"
    assert f"A pipeline of {num_stages} stages{each} needs at least {num_stages} blocks, but Sequential has" in said
    assert "a pipeline of 1 rank (fewer devices), or name more blocks" in said
    assert lay_out(model, make(name, 1, 4).num_stages, num_ranks=1) if not name.startswith(BIDIRECTIONAL) else True
    assert ('schedule="1f1b", which has one stage a rank' in said) == (num_stages == 4)
    assert num_stages == 2 or lay_out(model, 2).num_stages == 2


def test_a_model_without_blocks_is_one_stage_however_it_is_cut():
    for partition in ("time", "parameters", "count"):
        assert lay_out(nn.Module(), 1, partition=partition).bounds == (0, 0)
    with pytest.raises(
        ValueError, match=r"but Module has 0 \(none\)\. Use schedule=\"1f1b\", which has one stage a rank, or"
    ):
        lay_out(nn.Module(), 2, num_ranks=1)


def test_a_chain_that_is_too_short_is_not_taken():
    model = Transformer(num_blocks=2, width=16)
    model.small = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    assert find_blocks(model, 2) == ["blocks.0", "blocks.1"]
    assert find_blocks(model, 4) == [f"small.{i}" for i in range(4)]


def test_what_lies_around_the_blocks_goes_to_its_neighbours():
    stages = stages_of(lay_out(Transformer(), 2, partition="count"))
    assert stages == {"emb": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "norm": 1, "head": 1}
    moved = stages_of(lay_out(Transformer(), 2, partition="count", stages={"norm": 0, "head": -2}))
    assert moved["norm"] == moved["head"] == 0


def test_the_ways_to_name_blocks():
    model = Transformer()
    by_container = lay_out(model, 2, blocks="blocks")
    assert (
        by_container
        == lay_out(model, 2, blocks=["blocks"])
        == lay_out(model, 2, blocks=[f"blocks.{i}" for i in range(4)])
    )
    assert stages_of(lay_out(model, 2, blocks=["emb", "head"], partition="count"))["head"] == 1


def test_partitions():
    model = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model.example_input_array = torch.zeros(3, 2)
    assert lay_out(model, 2, partition="count").bounds == (0, 2, 4)
    assert lay_out(model, 2, partition="parameters").bounds == (0, 1, 4)
    assert lay_out(model, 2, partition="flops").bounds == (0, 1, 4)
    assert lay_out(model, 2, partition=[3, 1]).bounds == (0, 3, 4)
    assert lay_out(model, 4).bounds == (0, 1, 2, 3, 4)


def test_flops_count_what_parameters_do_not():
    class Reuses(nn.Module):
        """A convolution has few parameters and much to do."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 8), nn.Linear(8, 8))
            self.example_input_array = torch.zeros(1, 1, 8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    assert lay_out(Reuses(), 2, partition="flops").bounds[1] < lay_out(Reuses(), 2, partition="parameters").bounds[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 8}, r"A pipeline of 8 stages needs at least 8 blocks, but Transformer has \d+ \("),
        (
            {"blocks": "layers"},
            r"blocks= names \['layers'\], which Transformer does not have\. Its containers: \['blocks', ",
        ),
        (
            {"partition": [1, 2]},
            r"partition=\[1, 2\] must give each of 2 stages at least one block and sum to 4 blocks",
        ),
        ({"partition": [4, 0]}, r"partition=\[4, 0\] must give each of 2 stages at least one block"),
        (
            {"partition": "seconds"},
            r"partition='seconds': use \"parameters\", \"count\", \"flops\", \"time\" or a list of blocks a stage",
        ),
        ({"partition": "flops"}, r'partition="flops" runs Transformer\.forward once .* needs its example_input_array'),
        ({"stages": {"hat": 0}}, r"stages= names \['hat'\], which are not units\. The units: \['emb', 'blocks\.0', "),
    ],
)
def test_what_cannot_be_cut_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lay_out(Transformer(), **{"num_stages": 2, **options})


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_cut_is_the_cheapest_of_all(costs: list[int], data: st.DataObject):
    parts = data.draw(st.integers(1, len(costs)))
    bounds = min_max_cut(costs, parts)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and bounds == sorted(set(bounds)) and len(bounds) == parts + 1

    def dearest(bounds: list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    every = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), parts - 1)]
    assert dearest(bounds) == min(map(dearest, every))


def test_equal_blocks_are_dealt_evenly():
    assert min_max_cut([1.0] * 8, 4) == [0, 2, 4, 6, 8]
    sizes = [b - a for a, b in pairwise(min_max_cut([1.0] * 10, 4))]
    assert sorted(sizes) == [2, 2, 3, 3]


def test_time_balances_what_the_units_take():
    """The second half of the chain is three times as dear as the first, by times written down by hand."""
    model = Transformer(num_blocks=4)
    seconds = {"emb": 0.5, "blocks.0": 1.0, "blocks.1": 1.0, "blocks.2": 3.0, "blocks.3": 3.0, "norm": 0.0, "head": 0.5}
    layout = lay_out(model, 2, partition="time", seconds=seconds)
    assert layout.bounds == (0, 3, 4) and layout.shares == (5.5 / 9, 3.5 / 9)


class Doubling(nn.Module):
    """Blocks of two widths, the wide ones of 64 times the work, which takes its rows as floats and a mask."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 16, 1024, 1024)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w)) for w in widths)
        self.example_input_array = (torch.zeros(64, 16), torch.zeros(64, dtype=torch.bool))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.pad(x, (0, block[0].in_features - x.shape[1]))
            x = block(x).masked_fill(mask[:, None], 0.0)
        return x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_units_are_timed_without_the_whole_model(device: str):
    """Two linear layers of width 1024 take a multiple of two of width 16, also where the model has no memory."""
    model = Doubling().to(device)
    names = unit_names(model, 2)
    assert names == [f"blocks.{i}" for i in range(4)]
    before = torch.get_rng_state()
    costs = unit_costs(model, names, torch.device("cpu"), "a test")
    assert torch.equal(torch.get_rng_state(), before)
    assert costs["blocks.0"] == costs["blocks.1"] and costs["blocks.2"] == costs["blocks.3"]
    seconds = {name: cost.forward + cost.backward for name, cost in costs.items()}
    assert seconds["blocks.2"] > 2 * seconds["blocks.0"] > 0
    assert min(costs["blocks.2"].input_grad, costs["blocks.2"].weight_grad) > 0
    # Of 64 rows: the input of each linear layer (of the second it is ReLU's output). W needs both.
    assert (costs["blocks.2"].saved, costs["blocks.2"].waiting) == (2 * 64 * 1024 * 4, 2 * 64 * 1024 * 4)
    assert all(p.grad is None for p in model.parameters())


def test_a_frozen_embedding_is_timed_too():
    """It has nothing to back up, and keeps nothing."""
    model = gpt_of_many_words()
    model.embedding.requires_grad_(False)
    cost = unit_costs(model, ["embedding"], torch.device("cpu"), "a test")["embedding"]
    assert cost.forward > 0 and (cost.saved, cost.waiting) == (0.0, 0.0)


def test_the_model_on_shapes_takes_no_memory_and_keeps_its_ties():
    model = GPT(vocabulary=7, context=4, width=8, num_blocks=2, num_heads=2, tie_embeddings=True)
    model.example_input_array = torch.zeros(1, 4, dtype=torch.int64)
    shadow, _ = shadow_of(model, "a test")
    assert all(p.is_meta for p in shadow.parameters()) and all(b.is_meta for b in shadow.buffers())
    assert shadow.head.weight is shadow.embedding.weight and not model.head.weight.is_meta


def test_time_needs_an_example():
    with pytest.raises(ValueError, match=r'partition="time" runs Transformer.forward once on shapes alone and needs'):
        unit_costs(Transformer(), ["emb"], torch.device("cpu"), 'partition="time"')


def vgg() -> nn.Module:
    """Convolutions in a row as in VGG: the early ones work on large pictures, the late ones hold the parameters."""
    widths, layers, channels = (16, 16, 0, 32, 32, 0, 64, 64, 0, 128, 128), [], 3
    for width in widths:
        pool = nn.MaxPool2d(2)
        layers.append(nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()) if width else pool)
        channels = width or channels
    model = nn.Sequential(*layers)
    model.example_input_array = torch.zeros(2, 3, 64, 64)
    return model


def gpt_of_many_words() -> nn.Module:
    """A vocabulary of 50,000 over a narrow width: the head is dearer than all blocks."""
    model = GPT(vocabulary=50_000, context=16, width=32, num_blocks=24, num_heads=2, tie_embeddings=False)
    model.example_input_array = torch.zeros(2, 16, dtype=torch.int64)
    return model


@pytest.mark.parametrize("make_model", [vgg, gpt_of_many_words])
def test_measured_time_balances_what_counts_and_parameters_do_not(make_model):
    model = make_model()
    costs = unit_costs(model, unit_names(model, 2), torch.device("cpu"), "a test")
    seconds = {name: cost.forward + cost.backward for name, cost in costs.items()}
    dearest = {}
    for partition in ("time", "count", "parameters"):
        bounds = lay_out(model, 2, partition=partition, seconds=seconds).bounds
        first = lay_out(model, 2, partition="time", seconds=seconds)
        sizes = [bounds[1], bounds[2] - bounds[1]]
        stage_of = {unit.name: unit.stage for unit in lay_out(model, 2, partition=sizes).units}
        dearest[partition] = max(sum(seconds[n] for n in seconds if stage_of[n] == stage) for stage in (0, 1))
    assert dearest["time"] == pytest.approx(max(first.shares) * sum(seconds.values()))
    assert dearest["time"] <= min(dearest["count"], dearest["parameters"])
    assert dearest["time"] < 0.95 * dearest["parameters"]
