"""Find attention, perceptrons, embedding and head in modules that were not written for tensor parallelism.

The one idea: what is cut comes in pairs, linear modules that widen or make heads (cut by columns) and the one that
brings the features back (by rows). Their names are convention, and shapes have to fit: the second takes in what the
first give out. A model of `transformers` may say it itself (`base_model_tp_plan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_parallel.parallel.attention import can_share_heads
from lightning_parallel.parallel.experts import layout_of
from lightning_parallel.parallel.heads import fused_heads, says_heads
from lightning_parallel.parallel.styles import features_of, is_conv1d

Kind = Literal[
    "colwise",
    "keys",
    "fused",
    "rowwise",
    "vocab",
    "features",
    "head",
    "heads",
    "experts",
    "sequence",
    "summed",
    "joint",
    "sinks",
]


@dataclass(frozen=True)
class Style:
    """How a module is cut.

    Attributes:
        kind: a `Kind`.
        segments: how many equal matrices lie side by side in it.
        copies: how many ranks have each head of keys, where there are fewer than ranks.
        heads: of query, key and value in it, where their numbers differ.
    """

    kind: Any  # a Kind
    segments: int = 1
    copies: int = 1
    heads: tuple[int, ...] = ()

    def lengths(self, features: int) -> tuple[int, ...]:
        """Features of each matrix."""
        parts = self.heads or (1,) * self.segments
        return tuple(features * part // sum(parts) for part in parts)


@dataclass(frozen=True)
class Pair:
    """Names of column-wise modules, and how many matrices lie in each, and of the row-wise one behind them, within one
    module."""

    columns: tuple[str, ...]
    row: str
    attention: bool = False
    segments: tuple[int, ...] = ()

    def columns_with_segments(self) -> Iterator[tuple[str, int]]:
        return zip(self.columns, self.segments or (1,) * len(self.columns), strict=True)


PAIRS = (
    Pair(("q_proj", "k_proj", "v_proj"), "o_proj", True),  # Llama, Qwen, Gemma, Mistral; ViT
    Pair(("q_proj", "k_proj", "v_proj"), "out_proj", True),  # OPT, BART, Whisper, CLIP
    Pair(("self.query", "self.key", "self.value"), "output.dense", True),  # BERT, RoBERTa
    Pair(("attention.query", "attention.key", "attention.value"), "output.dense", True),  # ViT before transformers 5
    Pair(("q_lin", "k_lin", "v_lin"), "out_lin", True),  # DistilBERT
    Pair(("query", "key", "value"), "out", True),
    Pair(("query", "key", "value"), "proj", True),
    Pair(("qkv",), "out", True, (3,)),
    Pair(("qkv",), "proj", True, (3,)),
    Pair(("qkv_proj",), "o_proj", True, (3,)),
    Pair(("q_attn", "c_attn"), "c_proj", True, (1, 2)),  # GPT-2, to an encoder
    Pair(("c_attn",), "c_proj", True, (3,)),  # GPT-2, nanoGPT
    Pair(("q", "k", "v"), "o", True),  # T5
    Pair(("wi_0", "wi_1"), "wo"),
    Pair(("wi",), "wo"),
    Pair(("gate_proj", "up_proj"), "down_proj"),
    Pair(("up_proj",), "down_proj"),
    Pair(("up",), "down"),
    Pair(("c_fc",), "c_proj"),
    Pair(("fc1",), "fc2"),
    Pair(("lin1",), "lin2"),
    Pair(("linear1",), "linear2"),  # nn.TransformerEncoderLayer
    Pair(("w1", "w3"), "w2"),
    Pair(("intermediate.dense",), "output.dense"),
)
_BIASES = "relative_attention_bias"  # of T5: an embedding of distances with one feature a head
# transformers' words for ours; others leave a module whole.
_THEIRS = {
    "colwise": Style("colwise"), "rowwise": Style("rowwise"), "colwise_rep": Style("head"),
    "colwise_gather_output": Style("head"), "replicated_with_grad_allreduce": Style("summed"),
}  # fmt: skip


def find_plan(model: nn.Module, size: int) -> dict[str, Style]:
    """The styles of what is found, by module name, for so many ranks."""
    found: dict[str, Style] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if type(module) is nn.MultiheadAttention and can_share_heads(module):
            found |= {name: Style("heads"), f"{prefix}out_proj": Style("rowwise")}
        if layout_of(module):
            found[name] = Style("experts")
        for pair in PAIRS:
            names = [*pair.columns, pair.row]
            if all(f"{prefix}{x}" not in found for x in names) and _fits(module, pair):
                heads = fused_heads(module) if pair.attention and pair.segments == (3,) else ()
                found |= {
                    f"{prefix}{column}": Style("colwise", n, heads=heads) for column, n in pair.columns_with_segments()
                }
                found[f"{prefix}{pair.row}"] = Style("rowwise")
                found |= {
                    f"{prefix}{x}": Style("summed") for x in ("q_norm", "k_norm") if pair.attention and _has(module, x)
                }
                if pair.attention and isinstance(_get(module, _BIASES), nn.Embedding):
                    found[f"{prefix}{_BIASES}"] = Style("features")
    return {**found, **_their_plans(model, set(found)), **_vocabulary(model, set(found), size)}


def _fits(module: nn.Module, pair: Pair) -> bool:
    linear = {name: _get(module, name) for name in (*pair.columns, pair.row)}
    if not all(isinstance(x, nn.Linear) or (x is not None and is_conv1d(x)) for x in linear.values()):
        return False
    narrow = features_of(linear[pair.row])
    if pair.attention and not any(says_heads(x) for x in (module, *(_holder(module, c) for c in pair.columns))):
        return False
    column, segments = next(pair.columns_with_segments())
    queries, keys = heads[:2] if segments == 3 and (heads := fused_heads(module)) else (1, 1)
    return queries * features_of(linear[column])[1] == (queries + (segments - 1) * keys) * narrow[0]


def _their_plans(model: nn.Module, known: set[str]) -> dict[str, Style]:
    """What models of `transformers` say of themselves and no pair has found."""
    found: dict[str, Style] = {}
    for prefix, module in model.named_modules():
        plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if not plan or not hasattr(module, "base_model_prefix") or not _is_base(module):
            continue
        for pattern, word in plan.items():
            regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            for name, part in module.named_modules(prefix=prefix):
                inside = name.removeprefix(f"{prefix}.") if prefix else name
                if name not in known and word in _THEIRS and regex.fullmatch(inside) and _suits(part, _THEIRS[word]):
                    found[name] = _THEIRS[word]
    return found


def _is_base(module: Any) -> bool:
    """Whether a model of `transformers` is the one whose plan it is, and not one with a head around it."""
    return getattr(module, "base_model", None) is module


def _suits(module: nn.Module, style: Style) -> bool:
    return style.kind == "summed" or isinstance(module, nn.Linear)


def _vocabulary(model: nn.Module, known: set[str], size: int) -> dict[str, Style]:
    """The embedding of a language model and its head: a linear module that shares its weight, or the last of all."""
    heads = {name: m for name, m in _outside_blocks(model) if isinstance(m, nn.Linear) and name not in known}
    found: dict[str, Style] = {}
    for name, table in model.named_modules():
        if (
            not isinstance(table, nn.Embedding)
            or table.num_embeddings < size * size
            or _counts_positions(name)
            or table.sparse
            or table.max_norm
            or table.scale_grad_by_freq
        ):
            continue
        fitting = [head for head, m in heads.items() if m.weight is table.weight]
        if not fitting and not found and heads and (last := [*heads.items()][-1])[1].weight.shape == table.weight.shape:
            fitting = [last[0]]
        if fitting:
            found |= {name: Style("vocab"), **{head: Style("head") for head in fitting}}
    return found


def _counts_positions(name: str) -> bool:
    """Whether a module's name says that it is a table of positions, which has no head."""
    return re.search(r"(^|[._])(wpe|pos|position|positional|positions)([._]|$)", name.lower()) is not None


def _outside_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that lie in no list or sequence of modules."""
    inside = [
        f"{name}."
        for name, m in model.named_modules()
        if name and isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1
    ]
    for name, module in model.named_modules():
        if not any(name.startswith(prefix) for prefix in inside):
            yield name, module


def _get(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for part in path.split("."):
        found = found._modules.get(part) if isinstance(found, nn.Module) else None
    return found


def _has(module: nn.Module, name: str) -> bool:
    return _get(module, name) is not None


def _holder(module: nn.Module, path: str) -> nn.Module:
    found = _get(module, path.rpartition(".")[0]) if "." in path else module
    return module if found is None else found
