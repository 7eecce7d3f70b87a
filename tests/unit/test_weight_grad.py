"""A backward in two halves gives what a whole one gives: gradients of every leaf, bit by bit."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_parallel.pipeline.weight_grad import backward_inputs, plan, run_together
from tests.unit.weight_grad_cases import ANY, CASES, ROWS, Calls


def gradients(model, x):
    found = [(name, p.grad) for name, p in model.named_parameters()] + [("input", x.grad)]
    return {name: None if g is None else g.to_dense() if g.is_sparse else g for name, g in found}


def forward(model, x, trained):
    x = x.clone().requires_grad_(trained and x.is_floating_point())
    y = model(x)
    return x, y, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).cos()


def whole(model, x, trained=True):
    x, y, g = forward(model, x, trained)
    torch.autograd.backward([y], [g])
    return gradients(model, x)


def halves(model, x, trained=True):
    x, y, g = forward(model, x, trained)
    edge = torch.autograd.graph.get_gradient_edge(y)
    del y
    return x, backward_inputs([edge], [g])


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        same = ours[name] is None if gradient is None else torch.equal(ours[name], gradient)
        assert same, f"{name}: {ours[name]} is not {gradient}"


@pytest.mark.parametrize("trained", [True, False], ids=["input with gradient", "input without"])
@pytest.mark.parametrize("case", CASES)
def test_halves_give_the_gradients_of_the_whole(case, trained):
    make, x, number = CASES[case]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    theirs = [whole(reference, x, trained), whole(reference, x.flip(0), trained)][1]  # the second on top of the first
    for micro_batch in (x, x.flip(0)):
        inputs, weights = halves(model, micro_batch, trained)
        assert number in (len(weights), ANY)
        weights.run()
    assert_equal(gradients(model, inputs), theirs)


def test_inputs_have_their_gradients_before_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    theirs = whole(copy.deepcopy(model), ROWS)
    x, weights = halves(model, ROWS)
    ours = gradients(model, x)
    late = {"0.weight", "3.weight"}
    assert {name for name, gradient in ours.items() if gradient is None} == late
    assert_equal({k: v for k, v in ours.items() if k not in late}, {k: v for k, v in theirs.items() if k not in late})
    assert {id(p) for p in weights.parameters()} == {id(model[0].weight), id(model[3].weight)}


def test_what_has_run_is_gone():
    model = nn.Linear(4, 3)
    _, weights = halves(model, ROWS)
    weights.run()
    once = model.weight.grad.clone()
    weights.run()
    assert not weights and not weights.parameters() and torch.equal(model.weight.grad, once)


def test_a_new_gradient_is_laid_out_as_its_weight():
    for layer in (nn.Linear(4, 3), Conv1D(3, 4)):
        halves(layer, ROWS)[1].run()
        assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", ["layers", "Conv1D of transformers", "tied embedding and head", "used twice"])
def test_micro_batches_run_together(case, fused):
    make, x, number = CASES[case]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    for shift in range(3):
        theirs = whole(reference, x.roll(shift, 1))
    run_together([halves(model, x.roll(shift, 1))[1] for shift in range(2)], fused=fused)
    inputs, weights = halves(model, x.roll(2, 1))
    assert len(weights) == number
    weights.run(fused=fused)
    for name, gradient in gradients(model, inputs).items():  # summed in another order
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


def test_each_weight_is_ready_once_after_its_last_product():
    torch.manual_seed(0)
    model = CASES["used twice"][0]()
    theirs = whole(copy.deepcopy(model), ROWS)
    seen = []
    _, weights = halves(model, ROWS)
    weights.run(ready=lambda p: seen.append((p, p.grad.clone())))
    ((parameter, gradient),) = seen
    assert parameter is model.a.weight and torch.equal(gradient, theirs["a.weight"])


def test_an_unused_output_leaves_no_product():
    model = Calls(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    _, weights = halves(model, ROWS)
    assert len(weights) == 1
    weights.run()
    assert model.b.weight.grad is None


def test_several_roots_and_a_loss():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model)
    y = reference(ROWS)
    torch.autograd.backward([y.sum(), y.square()], [None, torch.ones(2, 3, 3)])
    y = model(ROWS)
    backward_inputs([y.sum(), y.square()], [None, torch.ones(2, 3, 3)]).run()
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_a_root_may_be_a_leaf():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    backward_inputs([model(ROWS).sum(), model.bias], [None, torch.ones(3)]).run()
    assert torch.equal(model.bias.grad, torch.full((3,), 7.0))


def test_gradients_that_do_not_fit_are_refused_as_autograd_does():
    """A shape that would stretch to the root's is none: what was not checked here would be summed in silence."""
    layer, x = nn.Linear(4, 3), torch.ones(2, 4)
    for make_root in (lambda y: y, torch.autograd.graph.get_gradient_edge):
        for wrong in (torch.ones(2, 1), torch.ones(5, 3)):
            with pytest.raises(RuntimeError, match=r"Mismatch in shape: grad_output\[0\]"):
                backward_inputs([make_root(layer(x))], [wrong])
        backward_inputs([make_root(layer(x))], [torch.ones(2, 3)]).run()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        backward_inputs([layer(x)], [None])
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 4.0))


def test_a_root_without_gradients_is_refused_as_autograd_does():
    with pytest.raises(RuntimeError, match="require"):
        backward_inputs([torch.ones(())], [None])


@pytest.mark.parametrize("case", ["layers", "embedding and layers", "tied embedding and head"])
def test_a_plan_may_be_made_before_the_gradients_come(case):
    make, x, number = CASES[case]
    torch.manual_seed(0)
    model = make()
    theirs = whole(copy.deepcopy(model), x)
    x, y, gradient = forward(model, x, trained=True)
    prepared = plan([y])
    weights = backward_inputs([y], [gradient], prepared)
    assert len(weights) == number
    weights.run()
    assert_equal(gradients(model, x), theirs)


def test_weights_and_gradients_of_another_layout():
    """What cannot be set or added to by hand goes through the engine, which keeps its own rules."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.randn(4, 3).t())
    reference = copy.deepcopy(model)
    for _ in range(2):
        theirs = whole(reference, ROWS)
        x, weights = halves(model, ROWS)
        weights.run()
        assert_equal(gradients(model, x), theirs)
        assert model.weight.grad.stride() == reference.weight.grad.stride()
