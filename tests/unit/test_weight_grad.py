"""A backward in two halves gives what a whole one gives: gradients of every leaf, bit by bit, for modules of all kinds."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from lightning_parallel.pipeline.weight_grad import backward_inputs, run_together

ROWS = torch.arange(24.0).reshape(2, 3, 4).sin()
IMAGES = torch.arange(2 * 4 * 5 * 5.0).reshape(2, 4, 5, 5).sin()
TOKENS = torch.tensor([[1, 2, 2], [0, 5, 2]])


class Calls(nn.Module):
    """Modules and parameters, and how they are called."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape))


def frozen(module):
    return module.requires_grad_(False)


def tied():
    parts = {"table": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
    parts["head"].weight = parts["table"].weight
    return Calls(lambda m, x: m.head(m.table(x).tanh()), **parts)


def lora():
    parts = {"base": frozen(nn.Linear(4, 4)), "down": nn.Linear(4, 2, bias=False), "up": nn.Linear(2, 4, bias=False)}
    return Calls(lambda m, x: m.base(x) + 2 * m.up(m.down(x)), **parts)


def attention(**options):
    options = {"embed_dim": 4, "num_heads": 2, "batch_first": True, **options}
    return Calls(lambda m, x: m.attend(x, x, x.detach(), need_weights=False)[0], attend=nn.MultiheadAttention(**options))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.t(), 2 * (x.flatten(0, -2).t() @ g.flatten(0, -2)) if ctx.needs_input_grad[1] else None


# Each makes a model: with the input, and how many products wait.
CASES = {
    "linear": (lambda: nn.Linear(4, 3), ROWS, 1),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), ROWS, 1),
    "linear on a matrix": (lambda: nn.Linear(4, 3), ROWS[0], 1),
    "linear on a row": (lambda: nn.Linear(4, 3), ROWS[0, 0], None),
    "linear on a transposed input": (lambda: Calls(lambda m, x: m.a(x.mT), a=nn.Linear(3, 3)), ROWS, None),
    "bias alone trains": (lambda: Calls(lambda m, x: F.linear(x, m.w.detach(), m.b), w=weight(3, 4), b=weight(3)), ROWS, 0),
    "layers": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False)), ROWS, 2),
    "fused qkv": (
        lambda: Calls(lambda m, x: F.scaled_dot_product_attention(*m.a(x).chunk(3, -1)), a=nn.Linear(4, 12)), ROWS, 1
    ),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), IMAGES, 1),
    "convolution without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), IMAGES, 1),
    "grouped convolution": (lambda: nn.Conv2d(4, 8, (3, 1), groups=2, dilation=2), IMAGES, 1),
    "convolution of one dimension": (lambda: nn.Conv1d(3, 2, 2), ROWS, 1),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, output_padding=1, stride=2), IMAGES, 1),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)), IMAGES, 2),
    "embedding": (lambda: nn.Embedding(6, 4), TOKENS, 1),
    "embedding with padding": (lambda: nn.Embedding(6, 4, padding_idx=2, scale_grad_by_freq=True), TOKENS, 1),
    "sparse embedding": (lambda: nn.Embedding(6, 4, sparse=True), TOKENS, 0),
    "embedding bag": (lambda: nn.EmbeddingBag(6, 4), TOKENS, 0),
    "embedding and layers": (lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4)), TOKENS, 2),
    "tied embedding and head": (tied, TOKENS, 2),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(3, 3)), ROWS, 0),
    "norm after a layer": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)), ROWS, 1),
    "Conv1D of transformers": (lambda: nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(4, 6)), ROWS, 2),
    "attention": (attention, ROWS, 4),
    "attention with keys of another width": (lambda: attention(kdim=4, vdim=4, bias=False), ROWS, 4),
    "used twice": (lambda: Calls(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(4, 4)), ROWS, 2),
    "matrix used twice": (lambda: Calls(lambda m, x: x @ m.w @ m.w, w=weight(4, 4)), ROWS, 2),
    "norm used twice": (lambda: Calls(lambda m, x: m.n(m.a(m.n(x))), n=nn.LayerNorm(4), a=nn.Linear(4, 4)), ROWS, 1),
    "weight on the left": (lambda: Calls(lambda m, x: m.w @ x[0].t(), w=weight(5, 4)), ROWS, 1),
    "both factors train": (lambda: Calls(lambda m, x: x @ (m.u @ m.v), u=weight(4, 2), v=weight(2, 3)), ROWS, 1),
    "one weight on both sides": (lambda: Calls(lambda m, x: x @ (m.w @ m.w), w=weight(4, 4)), ROWS, 0),
    "experts": (lambda: Calls(lambda m, x: torch.bmm(x, m.w), w=weight(2, 4, 5)), ROWS, 1),
    "experts on the left": (lambda: Calls(lambda m, x: torch.bmm(m.w, x), w=weight(2, 5, 3)), ROWS, 1),
    "einsum": (lambda: Calls(lambda m, x: torch.einsum("btc,hcd->bhtd", x, m.w), w=weight(2, 4, 5)), ROWS, 1),
    "addmm with factors": (
        lambda: Calls(lambda m, x: torch.addmm(m.b, x[0], m.w, beta=2, alpha=3), b=weight(3), w=weight(4, 3)), ROWS, 0
    ),
    "frozen layer before": (lambda: nn.Sequential(frozen(nn.Linear(4, 4)), nn.Linear(4, 4)), ROWS, 1),
    "frozen layer behind": (lambda: nn.Sequential(nn.Linear(4, 4), frozen(nn.Linear(4, 4))), ROWS, 1),
    "LoRA": (lora, ROWS, 2),
    "merged LoRA": (
        lambda: Calls(lambda m, x: F.linear(x, m.w.detach() + m.a @ m.b), w=weight(3, 4), a=weight(3, 2), b=weight(2, 4)),
        ROWS, 1,
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), ROWS, 0),
    "weight in a penalty as well": (lambda: Calls(lambda m, x: m.a(x) + m.a.weight.square().sum(), a=nn.Linear(4, 3)), ROWS, 0),
    "part of a weight in a penalty": (
        lambda: Calls(lambda m, x: m.a(x) + m.a.weight[:2].square().sum(), a=nn.Linear(4, 3)), ROWS, 0
    ),
    "slices of a weight": (lambda: Calls(lambda m, x: F.linear(x, m.w[:3]) + x @ m.w[3:].t()[:, :3], w=weight(7, 4)), ROWS, 2),
    "custom function": (lambda: Calls(lambda m, x: Doubled.apply(m.a(x), m.w), a=nn.Linear(4, 4), w=weight(4, 3)), ROWS, 1),
    "unknown module": (lambda: Calls(lambda m, x: m.b(m.a(x), x), a=nn.Linear(4, 4), b=nn.Bilinear(4, 4, 3)), ROWS, 1),
    "recurrent": (lambda: Calls(lambda m, x: m.r(x)[0], r=nn.GRU(4, 3, batch_first=True)), ROWS, None),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), ROWS, 2),
    "branches": (lambda: Calls(lambda m, x: torch.cat([m.a(x), m.b(x)], -1), a=nn.Linear(4, 2), b=nn.Linear(4, 3)), ROWS, 2),
    "complex": (lambda: Calls(lambda m, x: (x.to(torch.cfloat) @ m.w).abs(), w=nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))), ROWS, 0),
    "double precision": (lambda: nn.Linear(4, 3).double(), ROWS.double(), 1),
}  # fmt: skip


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
        if number is not None and not case.startswith("attention"):
            assert len(weights) == number
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
