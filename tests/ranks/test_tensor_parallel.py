"""Modules cut over a tensor axis compute what one process computes: outputs, gradients made whole, weights."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.demo.gpt import GPT
from lightning_parallel.parallel.axis import Sum, TensorAxis
from lightning_parallel.parallel.logits import VocabLogits
from lightning_parallel.parallel.tensor_parallel import TensorParallel
from tests.harness import run_ranks
from tests.trainer.architectures import BERT, DECODER, VIT

# Partial sums over features are added rank by rank: float32 rounding of values around 1, a few products deep.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# Adam divides by the root of the second moment: a gradient that nearly vanishes is all rounding, and decides a step.
ADAM = {"rtol": 1e-3, "atol": 2e-5}
MIXTRAL = {
    **DECODER, "vocab_size": 17, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}  # fmt: skip
GPT_OSS = {
    **DECODER, "vocab_size": 17, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4,
    "num_key_value_heads": 2, "attention_bias": True, "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
TOKENS = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([0, 2])


def gpt() -> nn.Module:
    return GPT(vocabulary=17, context=16, width=16, num_blocks=2, num_heads=4)


def build(name: str, options: dict[str, Any], **other: Any) -> nn.Module:
    config = getattr(transformers, f"{name.partition('For')[0].removesuffix('LMHeadModel')}Config")
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2} if "num_layers" not in options else {}
    return getattr(transformers, name)(config(**{**options, **sizes, **other}))


GPT2 = {
    "vocab_size": 17, "n_embd": 16, "n_positions": 16, "n_layer": 2, "n_head": 4, "use_cache": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


T5 = {
    "vocab_size": 17, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0,
    "use_cache": False, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
}  # fmt: skip


def lively(model: nn.Module) -> nn.Module:
    """With biases and sinks that are not zero."""
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def causal(model: Any) -> Tensor:
    logits = model(TOKENS) if isinstance(model, GPT) else model(input_ids=TOKENS).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def to_an_encoder(model: Any) -> Tensor:
    memory = torch.linspace(-1, 1, 4 * 5 * 16).view(4, 5, 16).cos()
    return model(input_ids=TOKENS, encoder_hidden_states=memory, labels=TOKENS).loss


def translate(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS.flip(1)[:, :6].contiguous()).loss


class Torch(nn.Module):
    """Encoder and decoder layers of torch, with masks, under a head."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.embedding, self.head = nn.Embedding(17, 16), nn.Linear(16, 17)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, **options), 1, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoderLayer(16, 4, **options, norm_first=True)
        self.attention = nn.MultiheadAttention(16, 4, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, padding = (
            self.embedding(ids),
            torch.zeros_like(ids, dtype=torch.bool).index_fill_(1, torch.tensor([7]), True),
        )
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        memory = self.encoder(x, src_key_padding_mask=padding)
        y = self.decoder(x, memory, tgt_mask=causal, tgt_is_causal=True)
        z, weights = self.attention(*[y.transpose(0, 1)] * 3, attn_mask=causal < 0)
        return self.head(y + z.transpose(0, 1) + weights.sum(-1, keepdim=True) * weights.amax(-1, keepdim=True))


class Grouped(nn.Module):
    """Attention of four heads to one or two heads of keys, all made by one product."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, keys, 4
        self.qkv, self.out = nn.Linear(16, (4 + 2 * keys) * 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split([count * self.head_dim for count in heads], -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def grouped(keys: int) -> nn.Module:
    padded = nn.Embedding(17, 16, padding_idx=12)  # which a later rank has: its row gets no gradient
    assert (TOKENS == 12).any()
    return nn.Sequential(padded, Grouped(keys), nn.LayerNorm(16), Grouped(keys), nn.Linear(16, 17))


def next_tokens(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


Make = Callable[[], nn.Module]
Loss = Callable[[Any], Tensor]
MODELS: dict[str, tuple[Make, Loss, int]] = {  # and how many parameters are cut
    "gpt": (gpt, causal, 2 * 6 + 1),
    "gpt2": (lambda: build("GPT2LMHeadModel", GPT2), causal, 2 * 6 + 1),
    "llama": (
        lambda: build("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 2, "vocab_size": 17}),
        causal,
        2 * 7 + 2,
    ),
    "llama, one head of keys": (
        lambda: build("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 1, "vocab_size": 17}),
        causal,
        2 * 7 + 2,
    ),
    "llama, one head of keys, repeated": (  # for each head of queries, by a number of the module's own
        lambda: build(
            "LlamaForCausalLM",
            {**DECODER, "num_key_value_heads": 1, "vocab_size": 17, "attn_implementation": "eager"},
        ),
        causal,
        2 * 7 + 2,
    ),
    "qwen3, one head of keys": (
        lambda: build("Qwen3ForCausalLM", {**DECODER, "num_key_value_heads": 1, "vocab_size": 17, "head_dim": 8}),
        causal,
        2 * 7 + 2,
    ),
    "qwen2, two heads of keys": (  # with biases
        lambda: build("Qwen2ForCausalLM", {**DECODER, "num_key_value_heads": 2, "vocab_size": 17}),
        causal,
        2 * (7 + 3) + 2,
    ),
    "gpt2, to an encoder": (
        lambda: build("GPT2LMHeadModel", {**GPT2, "add_cross_attention": True}),
        to_an_encoder,
        2 * (6 + 5) + 1,
    ),
    "t5": (lambda: build("T5ForConditionalGeneration", T5), translate, 2 * (4 + 2) + 2 * (8 + 2) + 2 + 1),
    "gated t5": (
        lambda: build("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
        translate,
        2 * (4 + 3) + 2 * (8 + 3) + 2 + 1,
    ),
    "qwen3": (
        lambda: build("Qwen3ForCausalLM", {**DECODER, "num_key_value_heads": 2, "vocab_size": 17, "head_dim": 8}),
        causal,
        2 * 7 + 2,
    ),
    "gemma2": (  # norms in front of and behind attention and perceptron
        lambda: build("Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": 4, "vocab_size": 17}),
        causal,
        2 * 7 + 1,
    ),
    "olmo2": (lambda: build("Olmo2ForCausalLM", {**DECODER, "vocab_size": 17}), causal, 2 * 7 + 2),
    "olmo2, one head of keys": (
        lambda: build("Olmo2ForCausalLM", {**DECODER, "num_key_value_heads": 1, "vocab_size": 17}),
        causal,
        2 * 7 + 2,
    ),
    "one product, one head of keys": (lambda: grouped(1), next_tokens, 2 * 3 + 3),
    "one product, two heads of keys": (lambda: grouped(2), next_tokens, 2 * 3 + 3),
    "mixtral": (  # with the router's own loss
        lambda: build("MixtralForCausalLM", MIXTRAL),
        causal,
        2 * (4 + 2) + 2,
    ),
    "gpt-oss": (  # experts with biases, kept the other way round; a sink for each head
        lambda: lively(build("GptOssForCausalLM", GPT_OSS)),
        causal,
        2 * (4 + 3 + 1 + 3) + 2,
    ),
    "bert": (
        lambda: build("BertForMaskedLM", {**BERT, "vocab_size": 17}),
        lambda model: model(input_ids=TOKENS, labels=TOKENS).loss,
        2 * (3 * 2 + 1 + 2 + 1) + 2,
    ),
    "torch": (
        Torch,
        next_tokens,
        (3 + 3) + (3 + 2 * 3) + 2 + 3,
    ),
    "vit": (
        lambda: build("ViTForImageClassification", VIT),
        lambda model: model(pixel_values=IMAGES, labels=LABELS).loss,
        2 * (3 * 2 + 1 + 2 + 1),
    ),
}


QUICK = (
    "gpt",
    "gpt2",
    "llama",
    "llama, one head of keys",
    "llama, one head of keys, repeated",
    "bert",
    "torch",
    "t5",
    "mixtral",
    "olmo2",
    "gpt-oss",
    "one product, one head of keys",
)  # of these the default tests have enough


def steps(
    model: nn.Module, loss_of: Loss, clip: Callable[[], Tensor], whole: Callable[[str, Tensor], Tensor],
    after_backward: Callable[[], None] = lambda: None,
) -> Any:  # fmt: skip
    """Three clipped steps of AdamW: losses, norms, first gradients, weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, gradients = [], [], {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        after_backward()
        if not step:
            gradients = {n: whole(n, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None}
        norms.append(clip())
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms), gradients, {
        n: whole(n, p.detach().clone()) for n, p in model.named_parameters()
    }  # fmt: skip


def clip_by(model: nn.Module, tensor: TensorParallel) -> Tensor:
    counted = [p.grad for n, p in model.named_parameters() if p.grad is not None and tensor.counts(n)]
    square = torch.stack([g.square().sum() for g in counted] or [torch.zeros(())]).sum()
    norm = tensor.axis.all_reduce(square).sqrt()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
    return norm


def on_ranks(name: str, size: int, **options: Any) -> list[Any]:
    make, loss_of, _ = MODELS[name]
    torch.manual_seed(1)
    model = make()
    model.train()

    def run(rank: int) -> Any:
        tensor = TensorParallel(model, TensorAxis(rank, size), torch.device("cpu"), **options)
        tensor.cut()
        add_up = lambda: tensor.sum_gradients(tensor.summed)  # noqa: E731
        result = steps(model, loss_of, lambda: clip_by(model, tensor), tensor.whole, add_up)
        bits = {n: p.detach().clone() for n, p in model.named_parameters() if n not in tensor.shares}
        cut = len({id(model.get_parameter(n)) for n in tensor.shares})
        return result, bits, cut

    return run_ranks(run, size)


def one_process(name: str) -> Any:
    make, loss_of, _ = MODELS[name]
    torch.manual_seed(1)
    model = make()
    model.train()
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    return steps(model, loss_of, clip, lambda name, value: value)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_two_ranks_are_one_process(name):
    assert_one_process(name, 2)


def assert_one_process(name: str, size: int, **options: Any) -> None:
    losses, norms, gradients, weights = one_process(name)
    ranks = on_ranks(name, size, **options)
    for (ours, our_norms, our_gradients, our_weights), bits, cut in ranks:
        assert cut == MODELS[name][2]
        torch.testing.assert_close(ours, losses, **CLOSE)
        torch.testing.assert_close(our_norms, norms, **CLOSE)
        torch.testing.assert_close(our_gradients, gradients, **CLOSE)
        for key, value in weights.items():
            # keys' shift all scores of a row alike: their gradient is rounding
            if key.endswith(("in_proj_bias", "qkv.bias")):
                keys = slice(16, 16 + (value.numel() - 16) // 2)
                our_weights[key][keys] = value[keys]
            torch.testing.assert_close(our_weights[key], value, **ADAM)
        assert all(torch.equal(value, ranks[0][1][n]) for n, value in bits.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "gpt2",
        "bert",
        "vit",
        "llama, one head of keys",
        "qwen3, one head of keys",
        "qwen2, two heads of keys",
        "olmo2, one head of keys",
        "gpt-oss",
        "t5",
        "one product, two heads of keys",
    ],
)
def test_four_ranks_are_one_process(name):
    assert_one_process(name, 4)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down, self.outer = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = self.inner(torch.ones_like(self.up(x)))
        y = self.outer(self.down(kept))
        self.masks += [kept.detach(), (y != 0).float()]
        return x + y


def test_masks_differ_where_features_are_cut_and_agree_where_they_are_whole():
    def run(rank: int) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(Perceptron(), Perceptron())
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu")).cut()
        model(torch.ones(16, 4))  # its first call, which is checked
        for part in model:
            part.masks.clear()
        model(torch.ones(16, 4))
        return [mask for part in model for mask in part.masks], torch.rand(1)

    (ours, after), (theirs, after_theirs) = run_ranks(run, 2)
    assert torch.equal(after, after_theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other) == (number % 2 == 1)
    assert not torch.equal(ours[0], ours[2])  # the second layer's are its own


def test_without_dropout_inside_what_is_drawn_is_what_one_process_draws():
    def run(rank: int, size: int) -> Tensor:
        torch.manual_seed(1)
        model = build("GPT2LMHeadModel", {**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3})
        TensorParallel(model, TensorAxis(rank, size), torch.device("cpu")).cut() if size > 1 else None
        torch.manual_seed(2)
        return causal(model.train()).detach()

    for loss in run_ranks(run, 2, 2):
        torch.testing.assert_close(loss, run(0, 1), **CLOSE)


@pytest.mark.parametrize(
    ("plan", "size", "words"),
    [
        (
            {"blocks.*.nothing": "colwise"},
            2,
            r"tensor_plan names 'blocks.\*.nothing', which fits no module of GPT.*down",
        ),
        ({"blocks.*.up": "columns"}, 2, r"tensor_plan\['blocks.\*.up'\]='columns': use \"colwise\""),
        ({"norm": "colwise"}, 2, r"tensor_plan makes `norm` \(LayerNorm\) \"colwise\", which is for linear modules"),
        ({"norm": "sequence", "blocks.*.up": "colwise"}, 2, r"makes `norm` \"sequence\", but its input is no slice"),
        ({"norm": "summed"}, 2, r"cuts no module of GPT over 2 ranks"),
        ("auto", 3, r"`blocks.0.qkv` has 16 features to cut, which 3 ranks"),
        ("auto", 8, r"`blocks.0` has num_heads=4, which 8 ranks of the tensor axis do not divide"),
        ({"blocks.*": "experts"}, 2, r"makes `blocks.0` \(Block\) \"experts\", whose parameters .*norm_1.weight"),
        ({"embedding": "vocab", "blocks.*.up": "colwise"}, 2, r"cuts `embedding.weight`, which `head` has too"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan, size, words):
    with pytest.raises(ValueError, match=words):
        TensorParallel(gpt(), TensorAxis(0, size), torch.device("cpu"), plan)


def test_experts_that_cannot_be_cut_are_refused():
    model = build("MixtralForCausalLM", {**MIXTRAL, "intermediate_size": 33})
    words = "`model.layers.0.mlp.experts` has experts of 33 inner features, which 2 ranks"
    with pytest.raises(ValueError, match=re.escape(words)):
        TensorParallel(model, TensorAxis(0, 2), torch.device("cpu"))


class Sorted(nn.Module):
    """Experts without biases, kept the other way round, gates in front of what they multiply; rows are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(3, 4, 12)), nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x.view(3, -1, 4) @ self.gate_up_proj).chunk(2, dim=-1)
        return (F.silu(gate) * up @ self.down_proj).view(-1, 4)


def test_experts_kept_the_other_way_round_are_one_process():
    torch.manual_seed(0)
    model, x = nn.Sequential(Sorted()), torch.randn(6, 4)
    expected = model(x).detach()

    def run(rank: int) -> tuple[Tensor, list[Any]]:
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu")).cut()
        return model(x).detach(), [tuple(p.shape) for p in model.parameters()]

    for ours, shapes in run_ranks(run, 2):
        torch.testing.assert_close(ours, expected, **CLOSE)
        assert shapes == [(3, 4, 6), (3, 3, 4)]


def test_experts_whose_gates_lie_otherwise_than_they_say_are_found_out():
    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = build("GptOssForCausalLM", GPT_OSS)
        for layer in model.model.layers:
            layer.mlp.experts.is_concatenated = True
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu")).cut()
        causal(model)

    with pytest.raises(
        ValueError, match=r"`model.layers.0.mlp.experts` computes other values on 2 ranks of the tensor"
    ):
        run_ranks(run, 2)


class Listed(nn.Module):
    """A router and experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(Perceptron() for _ in range(2))


def test_on_slices_a_router_of_experts_in_a_list_is_refused():
    model = nn.ModuleDict({"blocks": nn.Sequential(Listed(), Listed())})
    with pytest.raises(
        ValueError, match=re.escape("`blocks.0.gate` (Linear) has parameters, is cut by no style and is no")
    ):
        TensorParallel(model, TensorAxis(0, 2), torch.device("cpu"), sequence_parallel=True)


def test_fused_keys_whose_heads_do_not_fit_the_ranks_are_refused():
    words = "`1.qkv` has 32 features of 4 + 2 + 2 heads of query, key and value, which 8 ranks"
    with pytest.raises(ValueError, match=re.escape(words)):
        TensorParallel(grouped(2), TensorAxis(0, 8), torch.device("cpu"), {"*.qkv": "colwise:4+2+2"})


def test_norms_of_features_that_no_product_makes_are_refused():
    model = build("Olmo2ForCausalLM", DECODER)
    model.model.layers[1].self_attn.q_norm = nn.RMSNorm(12)
    words = "`model.layers.1.self_attn.q_norm` (RMSNorm) normalises 12 features, more than those of a head (4), and no"
    with pytest.raises(ValueError, match=re.escape(words)):
        TensorParallel(model, TensorAxis(0, 2), torch.device("cpu"))


def test_heads_of_keys_that_neither_divide_the_ranks_nor_are_divided_are_refused():
    model = build("LlamaForCausalLM", {**DECODER, "hidden_size": 24, "num_key_value_heads": 3}, num_attention_heads=12)
    with pytest.raises(ValueError, match=r"k_proj` has 3 heads of 2 features, which 4 ranks"):
        TensorParallel(model, TensorAxis(0, 4), torch.device("cpu"))


def test_code_that_takes_sizes_from_its_input_is_told_so():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv, self.out = 4, nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, x.shape[-1] // self.num_heads).unbind(2)
            return self.out(F.scaled_dot_product_attention(q, k, v).reshape(x.shape))

    def run(rank: int) -> str:
        model = nn.Sequential(Attention())
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu")).cut()
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 3, 16))
        return caught.value.__notes__[0]

    assert "`0` runs on 1/2 of its heads and features" in run_ranks(run, 2)[0]


class Hidden(nn.Module):
    """Its heads are where nobody looks."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.config, self.qkv, self.out = {"heads": 4}, nn.Linear(16, 48), nn.Linear(16, 16)
        self.num_heads = 4 if known else None

    def forward(self, x: Tensor) -> Tensor:
        heads = self.num_heads or self.config["heads"]
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_code_that_goes_on_with_wrong_heads_is_found_out_at_its_first_call():
    def run(rank: int, known: bool, word: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Hidden(known), Hidden(known))
        x = torch.randn(2, 3, 16)
        whole, state = model(x), torch.get_rng_state()
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu"), {"*.qkv": word, "*.out": "rowwise"}).cut()
        torch.testing.assert_close(model(x), whole, **CLOSE)
        return torch.equal(torch.get_rng_state(), state)

    assert all(run_ranks(run, 2, True, "colwise:3"))
    for known, word in ((False, "colwise:3"), (True, "colwise")):
        with pytest.raises(ValueError, match=r"`0` computes other values on 2 ranks of the tensor axis than whole"):
            run_ranks(run, 2, known, word)


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "gemma2",
        "mixtral",
        "gpt-oss",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama", "qwen3", "llama, one head of keys")),
    ],
)
def test_slices_of_the_sequence_are_one_process(name):
    assert_one_process(name, 2, sequence_parallel=True)


def test_between_blocks_a_rank_has_its_slice_and_draws_its_own_masks():
    def run(rank: int) -> Any:
        torch.manual_seed(1)
        model = GPT(vocabulary=17, context=16, width=16, num_blocks=2, num_heads=4, dropout=0.5)
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu"), sequence_parallel=True).cut()
        causal(model)
        seen: list[Tensor] = []
        model.blocks[1].norm_1.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        logits = model.train()(TOKENS[:, :1].expand(4, 8))  # the same token everywhere
        return seen[0].shape, seen[0][:, -1] - seen[0][:, -2], logits.shape, torch.rand(1)

    (shape, ours, logits, after), (_, theirs, _, after_theirs) = run_ranks(run, 2)
    assert (shape, logits) == ((4, 4, 16), (4, 8, 17)) and torch.equal(after, after_theirs)
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "loss_of", "words"),
    [
        (MODELS["bert"][0], MODELS["bert"][1], "`bert.encoder.layer.0` (BertLayer) does not compute on slices of the"),
        (MODELS["olmo2"][0], causal, "`model.layers.0` (Olmo2DecoderLayer) does not compute on slices of the sequence"),
        (MODELS["vit"][0], MODELS["vit"][1], "shape (2, 17, 16) and not [rows, positions, features] with positions"),
        (lambda: Perceptron(), None, "needs one list of blocks with everything that tensor_plan cuts"),
    ],
)
def test_blocks_that_cannot_work_on_slices_are_refused(make, loss_of, words):
    def run(rank: int) -> None:
        model = make()
        TensorParallel(model, TensorAxis(rank, 2), torch.device("cpu"), sequence_parallel=True).cut()
        loss_of(model)

    with pytest.raises(ValueError, match=re.escape(words)):
        run_ranks(run, 2)


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_cross_entropy_of_logits_apart_is_one_process(name):
    assert_one_process(name, 2, loss_parallel=True)


def test_logits_apart_are_gathered_for_anything_but_their_loss():
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(3, 4, 11, generator=generator), torch.randint(11, (12,), generator=generator)
    target[5] = -100

    def run(rank: int) -> None:
        axis, begin = TensorAxis(rank, 2), 6 * rank
        local = logits[..., begin : begin + 6].clone().requires_grad_()
        apart = VocabLogits(local, 11, begin, axis)
        assert apart.shape == logits.shape and apart.requires_grad and len(apart) == 3
        for kept in (apart[:, :-1], apart[..., 1:, :], apart.view(-1, 11), apart.flatten(0, 1), apart.double()[0]):
            assert isinstance(kept, VocabLogits) or kept.dtype == torch.float64
        for ask in (lambda x: x.argmax(-1), lambda x: x[..., 2], lambda x: x.softmax(-1).sum(), lambda x: x.flatten()):
            torch.testing.assert_close(ask(apart), ask(logits))
        for reduction in ("mean", "sum", "none"):
            whole = logits.clone().requires_grad_()
            losses = [F.cross_entropy(x.flatten(0, 1), target, reduction=reduction) for x in (apart, whole)]
            torch.testing.assert_close(losses[0], losses[1], **CLOSE)
            local.grad = None
            for loss in losses:
                loss.square().sum().backward()
            torch.testing.assert_close(local.grad, whole.grad[..., begin : begin + 6], **CLOSE)
        smooth = [F.cross_entropy(x.flatten(0, 1), target, label_smoothing=0.1) for x in (apart, logits)]
        torch.testing.assert_close(smooth[0], smooth[1], **CLOSE)

    run_ranks(run, 2)


class Heard(TensorAxis):
    """An axis that notes when sums of a backward begin and when they are waited for."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.heard: list[str] = []

    def begin_all_reduce(self, x: Tensor) -> Any:
        self.heard.append("sum begins")
        coming = super().begin_all_reduce(x)
        return Sum(coming, self._noted)

    def weight(self, name: str, gradient: Tensor) -> None:
        self.heard.append(name)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        self.heard.append("sum is waited for")
        yield


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_weights_gradients_are_made_while_gradients_of_inputs_are_summed(name):
    """Of each scope the first product (all there is in a GPT's); the others' come before, see `overlap`."""
    assert_one_process(name, 2, overlap=True)
    make, loss_of, _ = MODELS[name]
    torch.manual_seed(1)
    model = make()

    def run(rank: int) -> list[str]:
        axis = Heard(rank, 2)
        tensor = TensorParallel(model, axis, torch.device("cpu"), overlap=True)
        tensor.cut()
        for column, style in tensor.styles.items():
            if style.kind in ("colwise", "keys"):
                leaf = column.rpartition(".")[2]
                model.get_submodule(column).weight.register_hook(partial(axis.weight, leaf))
        loss_of(model).backward()
        return axis.heard

    begins, ends = "sum begins", "sum is waited for"
    layer = {"gpt": [["up"], ["qkv"]], "llama": [["up_proj", "gate_proj"], ["v_proj", "k_proj", "q_proj"]]}[name]
    for heard in run_ranks(run, 2):
        count = heard.count("sum begins")
        expected = [word for scope in layer for word in (*scope[:-1], begins, scope[-1], ends)]
        assert count and heard == expected * (count // len(layer))
