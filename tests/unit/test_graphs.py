"""Which calls of a block are replayed as CUDA graphs: what is decided on the host, before anything is captured."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_parallel.pipeline.graphs import BlockGraphs, SharedGraphs
from lightning_parallel.pipeline.weight_grad.deferred import Deferred

CPU = torch.device("cpu")


class Captured(Exception):
    """A call got so far that it would be captured."""


class Deciding(BlockGraphs):
    """Ends where a capture would begin, for which there is no device here."""

    def _capture(self, *args):
        raise Captured


def block(module: nn.Module | None = None) -> Deciding:
    shared = SharedGraphs(CPU)
    shared.end(training=True)
    return Deciding("net.0", module or nn.Linear(2, 2), shared, sends_gradients=False)


def call(graphs: BlockGraphs, *args, **kwargs):
    return graphs.call(lambda *args, **kwargs: "ran as it is", args, kwargs)


X = torch.ones(1, 2)


def test_calls_replay_from_the_second_training_step_on():
    shared = SharedGraphs(CPU)
    graphs = Deciding("net.0", nn.Linear(2, 2), shared, sends_gradients=False)
    assert call(graphs, X) == "ran as it is"
    shared.end(training=False)
    assert call(graphs, X) == "ran as it is"
    shared.end(training=True)
    with pytest.raises(Captured):
        call(graphs, X)


def test_what_nobody_will_back_up_runs_as_it_is():
    frozen = block(nn.Linear(2, 2).requires_grad_(False))
    assert call(frozen, X) == "ran as it is"
    with pytest.raises(Captured):
        call(frozen, X.clone().requires_grad_())
    with torch.no_grad():
        assert call(block(), X) == "ran as it is"


def test_parameters_that_are_unfrozen_later_count():
    module = nn.Linear(2, 2).requires_grad_(False)
    graphs = block(module)
    module.weight.requires_grad_(True)
    with pytest.raises(Captured):
        call(graphs, X)
    module.weight.register_hook(lambda gradient: gradient)
    assert call(graphs, X) == "ran as it is"


def test_what_is_watched_runs_as_it_is():
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_forward_hook(lambda *args: None)
    assert call(block(hooked), X) == "ran as it is"
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert call(block(), X) == "ran as it is"


def test_arguments_of_unknown_kinds_run_as_they_are():
    assert call(block(), X, object()) == "ran as it is"


def test_calls_are_told_apart_by_the_places_and_the_kinds_of_their_arguments():
    """1, 1.0 and True are equal to Python, and mean different calls; so do a tensor's and a number's place."""
    calls = [[X, 1], [X, 1.0], [X, True], [1, X], [X, 2], [X.clone().requires_grad_(), 1]]
    keys = [BlockGraphs._key(leaves) for leaves in calls]
    assert len(set(keys)) == len(calls)
    assert BlockGraphs._key([torch.zeros(1, 2), 1]) == keys[0]


class Slot:
    """What a call gets, where there is no device to capture on."""

    differentiable, outputs = (True,), (torch.ones(1, 2),)

    def __init__(self, free: list) -> None:
        self.free = free

    def refuse_other(self, tensors) -> None: ...

    def run(self, tensors) -> None: ...

    def packed(self, outputs):
        return outputs[0]

    def release(self) -> None:
        self.free.append(self)


class Lending(BlockGraphs):
    """Counts its captures."""

    captures = 0

    def _capture(self, work, leaves, spec, free):
        self.captures += 1
        return Slot(free)


def test_calls_of_one_step_take_slots_of_their_own_and_the_next_step_takes_them_again():
    shared = SharedGraphs(CPU)
    shared.end(training=True)
    graphs = Lending("net.0", nn.Linear(2, 2), shared, sends_gradients=False)
    for _ in range(2):
        call(graphs, X), call(graphs, X)
        assert graphs.captures == len(shared.lent) == 2
        shared.end(training=True)


class Waiting:
    """A replay whose weights wait: W adds 1 to every gradient of its block."""

    def __init__(self, module: nn.Module) -> None:
        self.block = BlockGraphs("net.0", module, SharedGraphs(CPU), sends_gradients=False)

    def weights(self) -> None:
        for parameter in self.block.parameters:
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad + 1


def test_a_parameter_is_ready_when_the_last_replay_of_its_block_is_over():
    """One block ran twice, one once, and a layer without graphs shares the latter's weight."""

    class Graphs:
        @contextmanager
        def leaving_weights(self):
            yield [Waiting(twice), Waiting(once), Waiting(twice)]

    twice, once, plain = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    tied = nn.Linear(2, 2, bias=False)
    tied.weight = once.weight
    deferred = Deferred([(plain(X) + tied(X)).sum()], Graphs())
    deferred.backward([torch.ones(())])
    seen = []
    deferred.run(lambda parameter: seen.append((parameter, parameter.grad.clone())))
    twos, ones = torch.full((2, 2), 2.0), torch.ones(2, 2)
    expected = [(plain.weight, ones), (once.weight, twos), (once.bias, ones[0]), (twice.weight, twos)]
    for (ours, gradient), (theirs, total) in zip(seen, [*expected, (twice.bias, twos[0])], strict=True):
        assert ours is theirs and torch.equal(gradient, total)
