"""Slices of a sequence: where it is cut, what of an argument belongs to a slice, attention to what came before, the
check of a block, and the lengths that TeraPipe's dynamic program finds."""

from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.demo.gpt import Block
from lightning_parallel.pipeline.partition.layout import lay_out
from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.schedules.slice_lengths import slice_lengths
from lightning_parallel.pipeline.stage.cut import CutModel, Hook
from lightning_parallel.pipeline.stage.random_streams import RandomStreams
from lightning_parallel.pipeline.token_slices.arguments import cut, is_mask, refuse_ahead
from lightning_parallel.pipeline.token_slices.attention import SlicedAttention
from lightning_parallel.pipeline.token_slices.check import check_block
from lightning_parallel.pipeline.token_slices.lengths import Slices

T = 8
CPU = torch.device("cpu")


# -- where a sequence is cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "length", "bounds"),
    [
        (4, 8, [0, 2, 4, 6, 8]),
        (3, 8, [0, 3, 6, 8]),
        (1, 5, [0, 5]),
        ([5, 2, 1], 8, [0, 5, 7, 8]),
    ],
)
def test_slices_cover_the_sequence(given, length, bounds):
    assert Slices.of(given).bounds(length) == tuple(pairwise(bounds))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (9, "A sequence of 8 tokens cannot be cut into 9 slices. Use fewer slices"),
        ([5, 2], r"slices=\[5, 2\] are 7 tokens, but the sequences of a micro-batch have 8"),
    ],
)
def test_sequences_that_cannot_be_cut_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Slices.of(given).bounds(8)


# -- what of an argument belongs to a slice ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, T, 16), (slice(None), slice(3, 6))),  # hidden states, rotary tables by row
        ((1, T, 4), (slice(None), slice(3, 6))),
        ((1, 1, T, 4), (slice(None), slice(None), slice(3, 6))),  # rotary tables by head
        ((T, 4), (slice(3, 6),)),
        ((T,), (slice(3, 6),)),
        ((T, T), (slice(3, 6), slice(0, 6))),  # masks
        ((2, 1, T, T), (slice(None), slice(None), slice(3, 6), slice(0, 6))),
        ((2, 1, 1, T), (slice(None), slice(None), slice(None), slice(0, 6))),
        ((2, 4), ()),
        ((), ()),
    ],
    ids=str,
)
def test_arguments_are_cut_by_their_shapes(shape, expected):
    x = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape).float()
    assert torch.equal(cut(x, 3, 6, T), x[expected])


def test_position_ids_are_no_mask():
    ids = torch.arange(T).expand(T, T)
    assert not is_mask(ids, T)
    assert cut(ids, 3, 6, T).tolist() == [[3, 4, 5]] * T


@pytest.mark.parametrize("shape", [(T, T), (2, 1, T, T)], ids=str)
def test_a_mask_that_looks_ahead_is_refused(shape):
    causal = torch.ones(shape, dtype=torch.bool).tril()
    added = torch.zeros(shape).masked_fill(~causal, float("-inf"))
    for mask in (causal, added):
        refuse_ahead("h.0", mask, T)
    causal[..., 2, 3], added[..., 2, 3] = True, 0.0
    for mask in (causal, added):
        with pytest.raises(PhantomError, match=r"A mask that `h\.0` is called with lets positions see later ones"):
            refuse_ahead("h.0", mask, T)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["", "grouped"])
def test_attention_slice_by_slice_is_attention(masked, shared):
    """Values and gradients of torch's own causal attention, with the keys and values of slices in one graph."""
    torch.manual_seed(0)
    query, out = torch.randn(2, 4, T, 6, dtype=torch.double), torch.randn(2, 4, T, 6, dtype=torch.double)
    key, value = (torch.randn(2, 2 if shared else 4, T, 6, dtype=torch.double) for _ in range(2))
    mask = torch.ones(T, T, dtype=torch.bool).tril().logical_and(torch.rand(T, T) < 0.7).fill_diagonal_(True)
    of = [x.clone().requires_grad_() for x in (query, key, value)]
    whole = F.scaled_dot_product_attention(*of, mask if masked else None, is_causal=not masked, enable_gqa=shared)
    expected = torch.autograd.grad(whole, of, out)
    again, pieces, before = [x.clone().requires_grad_() for x in (query, key, value)], [], []
    for start, end in Slices(3).bounds(T):
        part = [x[:, :, start:end] for x in again]
        with SlicedAttention(before, end) as attention:
            seen = mask[start:end, :end] if masked else None
            pieces.append(F.scaled_dot_product_attention(*part, seen, is_causal=not masked, enable_gqa=shared))
        before.append(attention.own)
    torch.testing.assert_close(torch.cat(pieces, 2), whole)
    torch.testing.assert_close(torch.autograd.grad(torch.cat(pieces, 2), again, out), expected)


def test_attention_that_is_not_causal_is_refused_and_that_to_something_else_is_left_alone():
    x, other = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4)
    with SlicedAttention((), 3):
        with pytest.raises(PhantomError, match="attention that is not causal"):
            F.scaled_dot_product_attention(x, x, x)
        crossed = F.scaled_dot_product_attention(x, other, other)
    assert torch.equal(crossed, F.scaled_dot_product_attention(x, other, other))


# -- the check of a block ----------------------------------------------------------------------------------------------


class Along(nn.Module):
    """A block with something that mixes positions."""

    def __init__(self, mix: nn.Module, swap: bool = False) -> None:
        super().__init__()
        self.linear, self.mix, self.swap = nn.Linear(16, 16), mix, swap

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + (self.mix(x.transpose(1, 2)).transpose(1, 2) if self.swap else self.mix(x))


class ByHand(nn.Module):
    """Causal attention, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        return x + scores.softmax(-1) @ v


class Counted(nn.Module):
    """Counts positions itself."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(T, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions(torch.arange(x.shape[1]))


class Noise(nn.Module):
    """Draws for all positions at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(x.shape[0], 1, 1)


class OneNumber(nn.Module):
    """Returns a number beside its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, x.mean()


def checked(block: nn.Module, *args: Tensor | None, slices: int = 3) -> int:
    """Check one block of a model of two."""
    torch.manual_seed(0)
    model = nn.Sequential(block, nn.Linear(16, 16))
    streams = RandomStreams(0, CPU)
    cut_model = CutModel(model, lay_out(model, 1, ["0", "1"], "count"), CPU, streams)
    hook: Hook = block.__dict__["_pipeline_hook"]
    with streams.step():
        length = check_block(hook, block, block.forward, (args, {}), Slices(slices), 5, streams)
    cut_model.release()
    return length


X = torch.randn(2, T, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_causal_block_passes_and_is_left_as_it_was(dropout):
    block = Block(16, 2, dropout)
    state = {name: value.clone() for name, value in block.state_dict().items()}
    assert checked(block, X) == checked(block, X, torch.ones(T, T, dtype=torch.bool).tril()) == T
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


DIFFERS = "does not compute on slices of a sequence what it computes on the whole"
MIXED = {
    "a convolution": (Along(nn.Conv1d(16, 16, 3, padding=1), swap=True), DIFFERS),
    "a norm along the sequence": (Along(nn.InstanceNorm1d(16), swap=True), DIFFERS),
    "BatchNorm": (Along(nn.BatchNorm1d(16), swap=True), DIFFERS),
    "a softmax along the sequence": (Along(nn.Sequential(nn.Linear(16, 16), nn.Softmax(1))), DIFFERS),
    "attention by hand": (ByHand(), DIFFERS),
    "positions of its own": (Counted(), DIFFERS),
    "one draw for all positions": (Noise(), DIFFERS),
    "a fixed length": (
        Along(nn.LayerNorm((T, 16))),
        r"does not compute on slices of a sequence: Given normalized_shape",
    ),
    "a number beside": (OneNumber(), r"returns a tensor of shape \(\), which does not have the 8 positions"),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_block_that_mixes_positions_otherwise_is_refused_by_name(name):
    block, words = MIXED[name]
    state = {key: value.clone() for key, value in block.state_dict().items()}
    with pytest.raises(PhantomError, match=rf"Block `0` {words}"):
        checked(block, X)
    assert all(torch.equal(value, state[key]) for key, value in block.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_mixes_little_is_seen_in_every_dtype(dtype):
    """A thousandth of the next position, which 8 bits do not show; parameters are as they were, to the bit."""
    block = Along(nn.Conv1d(16, 16, 3, padding=1), swap=True)
    nn.init.constant_(block.mix.weight, 1e-4)
    block.to(dtype)
    before = [(parameter, parameter.data_ptr(), parameter.clone()) for parameter in block.parameters()]
    with pytest.raises(PhantomError, match=f"Block `0` {DIFFERS}"):
        checked(block, X.to(dtype))
    causal = Block(16, 2, 0.1).to(dtype)
    assert checked(causal, X.to(dtype)) == T
    for parameter, place, value in before:
        assert parameter.data_ptr() == place
        assert torch.equal(parameter, value)


def test_a_block_that_attends_to_all_is_refused():
    with pytest.raises(PhantomError, match=r"Block `0` .*attention that is not causal"):
        checked(Full(), X)


class Full(nn.Module):
    """Attention without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("growth", [0.0, 0.1, 1.0])
def test_lengths_are_those_of_all_ways_to_cut(num_stages, start, growth):
    """The paper's latency, sum of times and (stages - 1) times the longest, over every way to cut ten tokens."""

    def seconds(tokens: int, before: int) -> float:
        return start + tokens * (1 + growth * (before + tokens / 2))

    def latency(lengths: list[int]) -> float:
        times = [seconds(n, sum(lengths[:i])) for i, n in enumerate(lengths)]
        return sum(times) + (num_stages - 1) * max(times)

    ways = (
        [b - a for a, b in pairwise((0, *places, 10))] for n in range(10) for places in combinations(range(1, 10), n)
    )
    found = slice_lengths(10, num_stages, seconds)
    assert sum(found) == 10
    assert latency(found) == pytest.approx(min(map(latency, ways)))


def test_lengths_are_multiples_of_the_unit():
    assert slice_lengths(64, 4, lambda tokens, before: 16.0 + tokens, unit=16) == [16] * 4
    with pytest.raises(ValueError, match=r"slice_lengths\(length=10, unit=4\): unit does not divide"):
        slice_lengths(10, 4, lambda tokens, before: 1.0, unit=4)
