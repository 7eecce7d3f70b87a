"""Which module is cut how: from a dict of name patterns, or found by `auto`.

The one idea: a plan is a dict {module name: Style}, whoever made it, checked against the module and the number of ranks
before anything is changed: a plan that cuts nothing, a pattern that fits nothing and what the ranks do not divide raise
with the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from lightning_parallel.parallel.attention import refuse_attention
from lightning_parallel.parallel.attention_extras import joint_norms, sinks
from lightning_parallel.parallel.auto import Style, find_plan
from lightning_parallel.parallel.experts import layout_of
from lightning_parallel.parallel.heads import head_features
from lightning_parallel.parallel.styles import features_of, is_conv1d

Plan = Literal["auto"] | Mapping[str, str]


def is_plan(value: Any) -> bool:
    """Whether a value names styles by patterns of module names."""
    return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)


KINDS = ("colwise", "rowwise", "vocab", "experts", "sequence", "summed")
WORDS = (
    '"'
    + '", "'.join(KINDS)
    + '"; "colwise:3" where a module holds 3 matrices side by side, "colwise:8+2+2" with heads of query, key and value'
)


def resolve(model: nn.Module, plan: Plan, size: int) -> dict[str, Style]:
    """The style of every module that is cut, by name, checked.

    Args:
        model: real or on meta.
        plan: "auto", or {pattern: style}; `*` stands for one part of a dotted name.
        size: ranks of the tensor axis.

    Returns:
        In the order of registration.

    Raises:
        ValueError: see the module's docstring.
    """
    found = find_plan(model, size) if plan == "auto" else _named(model, plan)
    if not any(style.kind not in ("summed", "sequence") for style in found.values()):
        raise ValueError(
            f"tensor_plan={plan!r} cuts no module of {type(model).__name__} over {size} ranks: no attention, perceptron"
            ' or embedding is of a form it knows. Name them: tensor_plan={"blocks.*.up": "colwise", "blocks.*.down":'
            ' "rowwise"}.'
        )
    if plan != "auto":
        _refuse_parts_left_over(model, found)
    found |= _shared_keys(model, found, size)
    found |= joint_norms(model, found) | sinks(model, found)
    for name, style in found.items():
        _check(model, name, style, size)
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def _named(model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    found: dict[str, Style] = {}
    for pattern, word in plan.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name, _ in model.named_modules() if regex.fullmatch(name)]
        if not names:
            close = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise ValueError(
                f"tensor_plan names {pattern!r}, which fits no module of {type(model).__name__}. `*` stands for one"
                f" part of a dotted name. Its linear modules end in {', '.join(close) or 'nothing: it has none'}."
            )
        found |= {name: _style(pattern, word, model.get_submodule(name)) for name in names}
    return found


def _refuse_parts_left_over(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Raise for a last linear module whose features stay divided.

    Raises:
        ValueError: it is cut "colwise", and nothing beside it is cut "rowwise".
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or is_conv1d(module)]
    last, joins = linear[-1] if linear else "", [name for name, style in styles.items() if style.kind == "rowwise"]
    beside = last.rpartition(".")[0]
    if styles.get(last) == Style("colwise") and not any(name.startswith(f"{beside}.") for name in joins if beside):
        raise ValueError(
            f'`{last}`, the last linear module, is cut "colwise" in tensor_plan, and nothing beside it is cut "rowwise"'
            f' to join its features: every rank would have a part of them. Cut it "vocab", which gathers what a head'
            " makes, or leave it out of tensor_plan."
        )


def _style(pattern: str, word: str, module: nn.Module) -> Style:
    kind, _, number = word.partition(":")
    heads = tuple(int(part) for part in number.split("+") if part.isdigit()) if "+" in number else ()
    if kind not in KINDS or (number and not number.isdigit() and len(heads) != number.count("+") + 1):
        raise ValueError(f"tensor_plan[{pattern!r}]={word!r}: use {WORDS}.")
    if kind == "vocab" and not isinstance(module, nn.Embedding):
        kind = "head"
    if kind == "colwise" and isinstance(module, nn.Embedding):
        kind = "features"
    return Style(kind, int(number or 1) if not heads else len(heads), heads=heads)


def _shared_keys(model: nn.Module, styles: Mapping[str, Style], size: int) -> dict[str, Style]:
    """Column-wise modules that make heads of keys or values, fewer than ranks: others in their module make more."""
    heads = {name: _heads(model, name) for name, style in styles.items() if style == Style("colwise")}
    most: dict[str, int] = {}
    for name, count in heads.items():
        holder = name.rpartition(".")[0]
        most[holder] = max(count, most.get(holder, 0))
    fused = {
        name: replace(style, kind="fused", copies=size // min(style.heads))
        for name, style in styles.items()
        if style.heads and min(style.heads) < size and size % min(style.heads) == 0
    }
    few = {n: c for n, c in heads.items() if 0 < c < min(size, most[n.rpartition(".")[0]]) and size % c == 0}
    return fused | {name: Style("keys", copies=size // count) for name, count in few.items()}


def _heads(model: nn.Module, name: str) -> int:
    """Heads that a linear module makes; 0 where nothing says so."""
    module, per_head = model.get_submodule(name), head_features(model, name)
    if not isinstance(module, nn.Linear) and not is_conv1d(module):
        return 0
    features = features_of(module)[1]
    return features // per_head if per_head and features % per_head == 0 else 0


def _check(model: nn.Module, name: str, style: Style, size: int) -> None:
    module = model.get_submodule(name)
    if style.kind == "heads":
        refuse_attention(module, name, size)  # type: ignore[arg-type]
        return
    if style.kind == "experts":
        _check_experts(name, module, size)
        return
    if style.kind in ("summed", "joint", "sinks"):
        return
    linear = style.kind in ("colwise", "keys", "fused", "rowwise", "head")
    if linear and not (isinstance(module, nn.Linear) or is_conv1d(module)):
        raise ValueError(
            f'tensor_plan makes `{name}` ({type(module).__name__}) "{style.kind}", which is for linear modules.'
        )
    if linear and _forward_of(module) not in _linear_forwards(module):
        raise ValueError(
            f"tensor_plan cuts `{name}` ({type(module).__name__}), whose forward is its own and not that of a linear"
            " module. Leave it out of the plan."
        )
    if (
        isinstance(module, nn.Embedding)
        and style.kind in ("vocab", "features")
        and (module.max_norm is not None or module.sparse)
    ):
        raise ValueError(f"tensor_plan cuts the embedding `{name}`, which has max_norm or sparse=True. Leave it out.")
    _check_sizes(model, name, module, style, size)


def _check_experts(name: str, module: nn.Module, size: int) -> None:
    layout = layout_of(module)
    if layout is None:
        shapes = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
        raise ValueError(
            f'tensor_plan makes `{name}` ({type(module).__name__}) "experts", whose parameters {shapes} are not'
            " gate_up_proj [experts, 2 inner, features] and down_proj [experts, features, inner], or both the other way"
            " round, with a bias of each or none. Leave it out."
        )
    if layout.inner % size:
        raise ValueError(
            f"`{name}` has experts of {layout.inner} inner features, which {size} ranks of the tensor axis do not"
            " divide. Choose another tensor_parallel_size."
        )


def _check_fused(name: str, features: int, style: Style, size: int) -> None:
    queries, *keys = style.heads
    if (
        features % sum(style.heads)
        or any(length % size for length in style.lengths(features))
        or queries % size
        or any(k % size and size % k for k in keys)
    ):
        raise ValueError(
            f"`{name}` has {features} features of {' + '.join(map(str, style.heads))} heads of query, key and value,"
            f" which {size} ranks of the tensor axis do not divide. Choose a tensor_parallel_size that divides heads of"
            " the query, and of which those of key and value are a divisor or a multiple."
        )


def _forward_of(module: Any) -> Any:
    return type(module).forward


def _linear_forwards(module: nn.Module) -> Sequence[Any]:
    """The forwards of the classes of linear modules that this one may have."""
    bases: list[Any] = [cls for cls in type(module).__mro__ if cls is nn.Linear or cls.__name__ == "Conv1D"]
    return [cls.forward for cls in bases]


def _check_sizes(model: nn.Module, name: str, module: Any, style: Style, size: int) -> None:
    if style.kind in ("vocab", "head"):
        rows = module.num_embeddings if isinstance(module, nn.Embedding) else features_of(module)[1]
        if -(-rows // size) * (size - 1) >= rows:
            raise ValueError(f"`{name}` has {rows} entries, too few for {size} ranks of the tensor axis.")
        return
    if style.kind not in ("colwise", "keys", "fused", "rowwise", "features"):
        return
    if style.heads:
        _check_fused(name, features_of(module)[1], style, size)
        return
    is_table = style.kind == "features"
    whole = module.embedding_dim if is_table else features_of(module)[style.kind != "rowwise"]
    features, per_head = whole // style.segments, 0 if is_table else head_features(model, name)
    if style.kind != "keys" and per_head and features % per_head == 0 and (features // per_head) % size:
        raise ValueError(
            f"`{name}` has {features // per_head} heads of {per_head} features, which {size} ranks of the tensor axis"
            " do not divide. Choose a tensor_parallel_size that divides the heads, and of which keys' and values' heads"
            " are a divisor or a multiple."
        )
    if features % size or whole % style.segments:
        raise ValueError(
            f"`{name}` has {features} features to cut, which {size} ranks of the tensor axis do not divide. Choose"
            " another tensor_parallel_size, or leave the module out of tensor_plan."
        )


def owners(styles: Mapping[str, Style]) -> list[str]:
    """Names of the smallest modules that hold column-wise ones and the row-wise one behind them."""
    found: dict[str, None] = {}
    columns: list[str] = []
    for name, style in styles.items():
        if style.kind == "experts":
            found[name] = None
        elif style.kind in ("colwise", "keys", "fused", "heads"):
            columns.append(name)
        elif style.kind == "rowwise" and columns:
            found[_common([*columns, name])] = None
            columns = []
    return list(found)


def _common(names: Sequence[str]) -> str:
    """What dotted names have in common at their beginnings."""
    parts = [name.split(".") for name in names]
    same = 0
    while len({tuple(part[: same + 1]) for part in parts}) == 1 and same < min(map(len, parts)) - 1:
        same += 1
    return ".".join(parts[0][:same])
