"""What a split backward keeps between its halves: the factors of the products that wait, and nothing else."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_parallel.demo.gpt import Block
from lightning_parallel.measure.storages import count_bytes, key_of, storages_of, tensors_in
from lightning_parallel.pipeline.weight_grad import backward_inputs

FLOAT, BATCH, LENGTH, WIDTH = 4, 2, 8, 16
TOKENS = BATCH * LENGTH * WIDTH * FLOAT  # bytes of one hidden state


class Made(TorchDispatchMode):
    """Remembers every storage that operators make while it is on, and does not keep it alive; views make none."""

    def __init__(self, *there_before):
        super().__init__()
        self.storages, self.there_before = {}, {key_of(s) for tensor in there_before for s in storages_of(tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result if isinstance(result, (tuple, list)) else [result]):
            for storage in storages_of(tensor):
                if key_of(storage) not in self.there_before:
                    self.storages[key_of(storage)] = (weakref.ref(storage), storage.nbytes())
        return result

    def alive(self):
        """Bytes of those that somebody holds."""
        gc.collect()
        return sum(nbytes for storage, nbytes in self.storages.values() if storage() is not None)


@pytest.fixture
def parts():
    torch.manual_seed(0)
    block = Block(WIDTH, 2, 0.0)
    return block, torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True), torch.ones(BATCH, LENGTH, WIDTH)


def test_what_is_kept_is_the_factors(parts):
    block, x, gradient = parts
    seen = set()
    count_bytes([*block.parameters(), x, gradient], "cpu", seen)
    with Made(*block.parameters(), x) as made:
        edge = torch.autograd.graph.get_gradient_edge(block(x))
    before = made.alive()
    weights = backward_inputs([edge], [gradient])
    del edge
    inputs = 4 * TOKENS + 3 * TOKENS  # of qkv, out and up one hidden state each, of down four
    assert made.alive() == inputs
    # Of the gradients that came in, that of `down` and `out`: the same hidden state, given from without, and its sum.
    incoming = (3 + 1 + 4) * TOKENS
    assert count_bytes(weights.tensors(), "cpu", seen) == inputs + incoming
    assert inputs < before / 2
    weights.run()
    assert made.alive() == 0


@pytest.mark.skipif(not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="PyTorch does not tell of hooks")
def test_a_checkpointed_block_keeps_its_factors_from_its_recomputation_on(parts):
    block, x, gradient = parts
    with Made(*block.parameters(), x) as made:
        edge = torch.autograd.graph.get_gradient_edge(checkpoint(block, x, use_reentrant=False))
    assert made.alive() == 0
    with Made(*block.parameters(), x) as made:
        weights = backward_inputs([edge], [gradient])
    assert len(weights) == 4
    kept = count_bytes(weights.tensors(), "cpu", set())
    weights.run()
    del edge
    assert kept == (4 + 3 + 3 + 1 + 4 + 1) * TOKENS


def test_products_are_freed_as_they_are_added(parts):
    block, x, gradient = parts
    weights = backward_inputs([block(x)], [gradient])
    left = []
    weights.run(ready=lambda parameter: left.append(count_bytes(weights.tensors(), "cpu", set())))
    assert left == [0, 0, 0, 0]


def test_what_was_not_run_is_freed_with_what_held_it(parts):
    block, x, gradient = parts
    with Made(*block.parameters(), x) as made:
        y = block(x)
    weights = backward_inputs([y], [gradient])
    del y, weights
    assert made.alive() == 0
