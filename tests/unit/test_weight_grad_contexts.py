"""A split backward under what surrounds a forward: checkpointing, autocast, compilation, hooks, failures."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.weight_grad import backward_inputs, plan, run_together, saved
from lightning_parallel.pipeline.weight_grad.saved import CannotRead, read_by_packing
from tests.unit.test_weight_grad import assert_equal, gradients, halves, whole
from tests.unit.weight_grad_cases import CASES, IMAGES, ROWS, TOKENS, Calls, tied

TOLD = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # PyTorch 2.9 does not: what passed hooks is not deferred


class Counted(nn.Module):
    """A perceptron that counts its calls."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.body(x)


def checkpointed(**options):
    """Two layers that are computed again, between two that are not."""
    parts = {"first": nn.Linear(4, 4), "block_1": Counted(), "block_2": Counted(), "last": nn.Linear(4, 3)}

    def call(model, x):
        x = checkpoint(model.block_1, model.first(x), **options)
        return model.last(checkpoint(model.block_2, x, **options))

    return Calls(call, **parts)


def assert_halves_equal_whole(model, x, number, run=lambda weights: weights.run()):
    theirs = whole(copy.deepcopy(model), x)
    inputs, weights = halves(model, x)
    assert len(weights) == number
    run(weights)
    assert_equal(gradients(model, inputs), theirs)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpointed_block_is_computed_again_once_and_its_weights_wait(early_stop):
    torch.manual_seed(0)
    model = checkpointed(use_reentrant=False, early_stop=early_stop)
    assert_halves_equal_whole(model, ROWS, 6 if TOLD else 2)
    assert (model.block_1.calls, model.block_2.calls) == (2, 2)


def test_a_reentrant_checkpoint_keeps_the_backward_whole():
    torch.manual_seed(0)
    model = checkpointed(use_reentrant=True)
    assert_halves_equal_whole(model, ROWS, 0)
    assert (model.block_1.calls, model.block_2.calls) == (2, 2)


def test_a_checkpoint_in_a_checkpoint():
    torch.manual_seed(0)
    inner = checkpointed(use_reentrant=False)
    model = Calls(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner)
    assert_halves_equal_whole(model, ROWS, 6 if TOLD else 0)


@pytest.mark.parametrize("case", ["convolutions", "tied embedding and head", "used twice", "Conv1D of transformers"])
def test_a_checkpoint_around_a_model(case):
    make, x, number = CASES[case]
    torch.manual_seed(0)
    model = Calls(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=make())
    assert_halves_equal_whole(model, x, number if TOLD else 0)


def test_weights_of_a_checkpointed_block_may_be_used_elsewhere():
    torch.manual_seed(0)
    block = nn.Linear(4, 4)
    model = Calls(lambda m, x: checkpoint(m.a, x, use_reentrant=False) + m.a.weight.sum(), a=block)
    assert_halves_equal_whole(model, ROWS, 0)


def test_the_same_graph_goes_backward_twice_through_a_checkpoint():
    torch.manual_seed(0)
    model = checkpointed(use_reentrant=False)
    y = model(ROWS).sum()
    torch.autograd.backward([y], retain_graph=True)
    theirs = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    backward_inputs([y], [None]).run()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), theirs, strict=True))


def test_tensors_saved_elsewhere_are_brought_back():
    torch.manual_seed(0)
    model = CASES["layers"][0]()
    reference = copy.deepcopy(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
        theirs = whole(reference, ROWS)
        x, weights = halves(model, ROWS)
        assert len(weights) == (2 if TOLD else 0)
        weights.run()
    assert_equal(gradients(model, x), theirs)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("case", ["layers", "attention", "used twice", "convolutions", "tied embedding and head"])
def test_autocast(case, cached):
    make, x, number = CASES[case]
    torch.manual_seed(0)
    model = Calls(
        lambda m, x: torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)(m.inner)(x).float(), inner=make()
    )
    assert_halves_equal_whole(model, x, number)


def test_autocast_with_gradients_that_are_there():
    torch.manual_seed(0)
    inner = CASES["layers"][0]()
    model = Calls(lambda m, x: torch.autocast("cpu", torch.bfloat16)(m.inner)(x).float(), inner=inner)
    reference = copy.deepcopy(model)
    for _ in range(2):
        theirs = whole(reference, ROWS)
        x, weights = halves(model, ROWS)
        weights.run(fused=True)  # products are bfloat16, gradients are not: nothing to fuse
    assert_equal(gradients(model, x), theirs)


def test_autocast_around_a_checkpoint():
    torch.manual_seed(0)
    inner = checkpointed(use_reentrant=False)
    model = Calls(lambda m, x: torch.autocast("cpu", torch.bfloat16)(m.inner)(x).float(), inner=inner)
    assert_halves_equal_whole(model, ROWS, 6 if TOLD else 2)


def test_a_cast_weight_that_is_used_otherwise_too():
    torch.manual_seed(0)

    def call(model, x):
        w = model.w.bfloat16()
        return (x.bfloat16() @ w + w.square().sum()).float()

    assert_halves_equal_whole(Calls(call, w=nn.Parameter(torch.randn(4, 3))), ROWS, 0)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler asks
def test_gradients_of_a_compiled_block_come_with_the_inputs():
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4), Calls(lambda m, x: m.a(x).tanh(), a=nn.Linear(4, 4)), nn.Linear(4, 4)]
    model = nn.Sequential(*blocks)
    theirs = whole(copy.deepcopy(model), ROWS)
    blocks[1].compile(backend="aot_eager")
    x, weights = halves(model, ROWS)
    assert {id(p) for p in weights.parameters()} == {id(blocks[0].weight), id(blocks[2].weight)}
    weights.run()
    for name, gradient in gradients(model, x).items():  # the compiler may sum in another order
        torch.testing.assert_close(gradient, theirs[name])


def with_hooks(model, notes):
    """Hooks of every kind; what they change is not linear, so that they must see whole gradients."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g: g.clamp(-0.3, 0.2))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: notes.append((name, p.grad.clone())))
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is model:
            continue  # torch warns: no gradient goes further
        module.register_full_backward_pre_hook(lambda m, g: (g[0] * 2,))
        module.register_full_backward_hook(lambda m, g, _: tuple(x if x is None else x.abs() for x in g))
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", ["layers", "used twice", "tied embedding and head", "weight in a penalty as well"])
def test_hooks_see_what_they_see_in_a_whole_backward(case, fused):
    make, x, number = CASES[case]
    torch.manual_seed(0)
    model, ours, theirs = make(), [], []
    reference = with_hooks(copy.deepcopy(model), theirs)
    model = with_hooks(model, ours)
    for _ in range(2):
        whole(reference, x)
        _, weights = halves(model, x)
        assert len(weights) == number
        weights.run(fused=fused)
    assert sorted(name for name, _ in ours) == sorted(name for name, _ in theirs)
    for name, _ in model.named_parameters():
        assert all(
            torch.equal(a, b)
            for a, b in zip(*[[g for n, g in notes if n == name] for notes in (ours, theirs)], strict=True)
        )


def test_hooks_on_a_parameters_node():
    torch.manual_seed(0)
    model, notes = nn.Linear(4, 3, bias=False), []
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    node.register_hook(lambda _, g: notes.append(g[0].clone()))
    assert_halves_equal_whole(model, ROWS, 1)
    assert len(notes) == 1 and torch.equal(notes[0], model.weight.grad)


def test_the_node_of_several_gradients_is_ready_once_for_micro_batches_together():
    model, notes = tied(), []
    model.table.weight.register_post_accumulate_grad_hook(lambda p: notes.append(p))
    ready = []
    run_together([halves(model, TOKENS)[1] for _ in range(3)], ready=ready.append)
    assert len(notes) == len(ready) == 1


def test_a_failure_in_the_backward_leaves_nothing_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reference = copy.deepcopy(model)

    def fail(gradient):
        raise ValueError("the user's own")

    x = ROWS.clone().requires_grad_()
    hidden = model[0](x)
    y = model[1](hidden)
    handle = hidden.register_hook(fail)
    with pytest.raises(ValueError, match="the user's own"):
        backward_inputs([y], [torch.ones_like(y)])
    handle.remove()
    model.zero_grad()
    assert_equal_after(model, reference)


def assert_equal_after(model, reference):
    theirs = whole(reference, ROWS)
    x, weights = halves(model, ROWS)
    weights.run()
    assert_equal(gradients(model, x), theirs)


@pytest.mark.skipif(not TOLD, reason="what is read by way of hooks is not checked")
def test_what_was_written_to_since_the_forward_is_refused():
    model = nn.Linear(4, 3)
    x = torch.ones(2, 4)
    y = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_inputs([y], [torch.ones_like(y)])


def test_images_in_channels_last():
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    assert_halves_equal_whole(model, IMAGES.to(memory_format=torch.channels_last), 1)


def test_a_graph_that_is_gone_is_refused_as_autograd_does():
    y = nn.Linear(4, 3)(ROWS)
    backward_inputs([y], [torch.ones_like(y)])
    with pytest.raises(RuntimeError, match="second time"):
        backward_inputs([y], [torch.ones_like(y)])


def test_a_saved_tensor_can_be_read_where_torch_does_not_tell_of_hooks():
    """In PyTorch 2.9 nothing says whether a saved tensor passed hooks."""
    layer, x = nn.Linear(4, 3, bias=False), ROWS[0].clone().requires_grad_()
    y = layer(x.sin())
    assert torch.equal(read_by_packing(y.grad_fn._raw_saved_self), x.sin())
    y.sum().backward()
    assert torch.equal(layer.weight.grad[0], x.detach().sin().sum(0)) and x.grad is not None
    y = checkpoint(layer, x.sin(), use_reentrant=False)
    with pytest.raises(CannotRead):
        read_by_packing(y.grad_fn._raw_saved_self)


def test_where_torch_does_not_tell_of_hooks_a_weight_is_read_in_its_turn(monkeypatch: pytest.MonkeyPatch):
    """Its memory may be there by then and not before, as that of divided parameters is."""
    monkeypatch.setattr(saved, "_TELLS_HOOKS", False)
    a, b, x = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 2)), torch.randn(5, 3)
    expected = torch.autograd.grad((x @ (b @ a).t()).square().sum(), [a, b])
    root = (x @ (b @ a).t()).square().sum()
    memory = [a.data, b.data]
    for parameter in (a, b):
        parameter.data = torch.full_like(parameter, float("nan"))
    prepared = plan([root])
    for parameter, data in zip((a, b), memory, strict=True):
        parameter.data = data
    backward_inputs([root], [torch.ones(())], prepared).run()
    assert all(map(torch.equal, (a.grad, b.grad), expected))
