"""Models of all kinds for a split backward: how to make each, what goes in, how many products of weights can wait."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

ROWS = torch.arange(24.0).reshape(2, 3, 4).sin()
IMAGES = torch.arange(2 * 4 * 5 * 5.0).reshape(2, 4, 5, 5).sin()
ANY = None  # however many: it is the operator's business how it computes
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


def frozen(module):
    return module.requires_grad_(False)


def tied():
    parts = {"table": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
    parts["head"].weight = parts["table"].weight
    return Calls(lambda m, x: m.head(m.table(x).tanh()), **parts)


def lora():
    parts = {"base": frozen(nn.Linear(4, 4)), "down": nn.Linear(4, 2, bias=False), "up": nn.Linear(2, 4, bias=False)}
    return Calls(lambda m, x: m.base(x) + 2 * m.up(m.down(x)), **parts)


def attention(cross=False, **options):
    options = {"embed_dim": 4, "num_heads": 2, "batch_first": True, **options}
    width = options.get("kdim", 4)

    def call(model, x):
        keys = x[..., :width] if cross else x
        return model.attend(x, keys, keys, need_weights=False)[0]

    return Calls(call, attend=nn.MultiheadAttention(**options))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.t(), 2 * (x.flatten(0, -2).t() @ g.flatten(0, -2)) if ctx.needs_input_grad[1] else None


def linear(width=3, **options):
    return nn.Linear(4, width, **options)


def calls(call, **parts):
    return lambda: Calls(call, **{name: part() for name, part in parts.items()})


def layers(*parts):
    return lambda: nn.Sequential(*[part() for part in parts])


def matrix(*shape, **options):
    return lambda: nn.Parameter(torch.randn(*shape, **options))


def square(**options):
    return nn.Linear(4, 4, **options)


def bias_of_frozen_weight(m, x):
    return F.linear(x, m.w.detach(), m.b)


def penalised(m, x):
    return m.a(x) + m.a.weight.square().sum()


def partly_penalised(m, x):
    return m.a(x) + m.a.weight[:2].square().sum()


def merged(m, x):
    return F.linear(x, m.w.detach() + m.a @ m.b)


def sliced(m, x):
    return F.linear(x, m.w[:3]) + x @ m.w[3:].t()[:, :3]


def with_factors(m, x):
    return torch.addmm(m.b, x[0], m.w, beta=2, alpha=3)


def fused_attention(m, x):
    return F.scaled_dot_product_attention(*m.a(x).chunk(3, -1))


CASES = {
    "linear": (linear, ROWS, 1),
    "linear without bias": (lambda: linear(bias=False), ROWS, 1),
    "linear on a matrix": (linear, ROWS[0], 1),
    "linear on a row": (linear, ROWS[0, 0], ANY),
    "linear on a transposed input": (calls(lambda m, x: m.a(x.mT), a=lambda: nn.Linear(3, 3)), ROWS, ANY),
    "linear in double precision": (lambda: linear().double(), ROWS.double(), 1),
    "bias alone trains": (calls(bias_of_frozen_weight, w=matrix(3, 4), b=matrix(3)), ROWS, 0),
    "layers": (layers(lambda: linear(8), nn.GELU, lambda: nn.Linear(8, 4, bias=False)), ROWS, 2),
    "branches": (calls(lambda m, x: torch.cat([m.a(x), m.b(x)], -1), a=linear, b=square), ROWS, 2),
    "in place": (layers(square, lambda: nn.ReLU(inplace=True), square), ROWS, 2),
    "fused qkv": (calls(fused_attention, a=lambda: linear(12)), ROWS, 1),
    "attention": (attention, ROWS, 2),
    "attention to others": (lambda: attention(cross=True, bias=False), ROWS, 3),
    "attention to keys of another width": (lambda: attention(cross=True, kdim=3, vdim=3), ROWS, 4),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), IMAGES, 1),
    "convolution without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), IMAGES, 1),
    "grouped convolution": (lambda: nn.Conv2d(4, 8, (3, 1), groups=2, dilation=2), IMAGES, 1),
    "convolution of one dimension": (lambda: nn.Conv1d(3, 2, 2), ROWS, 1),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 3, output_padding=1, stride=2), IMAGES, 1),
    "convolutions": (
        layers(lambda: nn.Conv2d(4, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.Conv2d(4, 2, 1)),
        IMAGES,
        2,
    ),
    "embedding": (lambda: nn.Embedding(6, 4), TOKENS, 1),
    "embedding with padding": (lambda: nn.Embedding(6, 4, padding_idx=2, scale_grad_by_freq=True), TOKENS, 1),
    "sparse embedding": (lambda: nn.Embedding(6, 4, sparse=True), TOKENS, 0),
    "embedding bag": (lambda: nn.EmbeddingBag(6, 4), TOKENS, 0),
    "embedding and layers": (layers(lambda: nn.Embedding(6, 4), square, lambda: nn.LayerNorm(4)), TOKENS, 2),
    "tied embedding and head": (tied, TOKENS, 2),
    "norms": (layers(lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), lambda: nn.GroupNorm(3, 3)), ROWS, 0),
    "norms after a layer": (layers(square, lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4)), ROWS, 1),
    "Conv1D of transformers": (layers(lambda: Conv1D(6, 4), nn.Tanh, lambda: Conv1D(4, 6)), ROWS, 2),
    "used twice": (calls(lambda m, x: m.a(m.a(x).tanh()), a=square), ROWS, 2),
    "matrix used twice": (calls(lambda m, x: x @ m.w @ m.w, w=matrix(4, 4)), ROWS, 2),
    "norm used twice": (calls(lambda m, x: m.n(m.a(m.n(x))), n=lambda: nn.LayerNorm(4), a=square), ROWS, 1),
    "recurrent": (calls(lambda m, x: m.r(x)[0], r=lambda: nn.GRU(4, 3, batch_first=True)), ROWS, ANY),
    "weight on the left": (calls(lambda m, x: m.w @ x[0].t(), w=matrix(5, 4)), ROWS, 1),
    "product of weights": (calls(lambda m, x: x @ (m.u @ m.v), u=matrix(4, 2), v=matrix(2, 3)), ROWS, 1),
    "square of a weight": (calls(lambda m, x: x @ (m.w @ m.w), w=matrix(4, 4)), ROWS, 0),
    "slices of a weight": (calls(sliced, w=matrix(7, 4)), ROWS, 2),
    "experts": (calls(lambda m, x: torch.bmm(x, m.w), w=matrix(2, 4, 5)), ROWS, 1),
    "experts on the left": (calls(lambda m, x: torch.bmm(m.w, x), w=matrix(2, 5, 3)), ROWS, 1),
    "einsum": (calls(lambda m, x: torch.einsum("btc,hcd->bhtd", x, m.w), w=matrix(2, 4, 5)), ROWS, 1),
    "addmm with factors": (calls(with_factors, b=matrix(3), w=matrix(4, 3)), ROWS, 0),
    "complex": (calls(lambda m, x: (x.cfloat() @ m.w).abs(), w=matrix(4, 3, dtype=torch.cfloat)), ROWS, 0),
    "frozen layer before": (layers(lambda: frozen(square()), square), ROWS, 1),
    "frozen layer behind": (layers(square, lambda: frozen(square())), ROWS, 1),
    "LoRA": (lora, ROWS, 2),
    "merged LoRA": (calls(merged, w=matrix(3, 4), a=matrix(3, 2), b=matrix(2, 4)), ROWS, 1),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), ROWS, 0),
    "weight in a penalty as well": (calls(penalised, a=linear), ROWS, 0),
    "part of a weight in a penalty": (calls(partly_penalised, a=linear), ROWS, 0),
    "custom function": (calls(lambda m, x: Doubled.apply(m.a(x), m.w), a=square, w=matrix(4, 3)), ROWS, 1),
    "unknown module": (calls(lambda m, x: m.b(m.a(x), x), a=square, b=lambda: nn.Bilinear(4, 4, 3)), ROWS, 1),
}
