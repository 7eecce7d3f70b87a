"""What `tensor_plan="auto"` finds by names and shapes, and what is said where a cut module cannot compute."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_parallel.parallel.auto import Style, find_plan
from lightning_parallel.parallel.styles import _explain


class Attention(nn.Module):
    """Four heads of queries and fewer of keys, in modules of their own or made by one product."""

    def __init__(self, keys: int, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, keys, 2
        if fused:
            self.qkv, self.out = nn.Linear(8, (4 + 2 * keys) * 2), nn.Linear(8, 8)
        else:
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 2 * keys)
            self.v_proj, self.o_proj = nn.Linear(8, 2 * keys), nn.Linear(8, 8)


def plan_of(module: nn.Module) -> dict[str, Style]:
    return find_plan(nn.Sequential(module), 2)


def test_heads_of_keys_that_have_a_module_of_their_own_are_cut_like_any_features():
    columns = {f"0.{name}": Style("colwise") for name in ("q_proj", "k_proj", "v_proj")}
    assert plan_of(Attention(2, fused=False)) == {**columns, "0.o_proj": Style("rowwise")}


@pytest.mark.parametrize(("keys", "heads"), [(4, ()), (2, (4, 2, 2)), (1, (4, 1, 1))])
def test_one_product_of_queries_keys_and_values_is_cut_by_the_heads_of_each(keys: int, heads: tuple[int, ...]):
    assert plan_of(Attention(keys, fused=True)) == {
        "0.qkv": Style("colwise", 3, heads=heads),
        "0.out": Style("rowwise"),
    }


@pytest.mark.parametrize(
    ("options", "is_cut"),
    [({}, True), ({"add_zero_attn": True}, False), ({"add_bias_kv": True}, False), ({"kdim": 4, "vdim": 4}, False)],
)
def test_attention_of_torch_is_cut_where_its_heads_can_be_told_apart(options: dict[str, Any], is_cut: bool):
    found = plan_of(nn.MultiheadAttention(8, 2, **options))
    assert found == ({"0": Style("heads"), "0.out_proj": Style("rowwise")} if is_cut else {})


class Says(nn.Module):
    """A model that says itself how it is cut, by names within its base."""

    base_model_prefix = "model"
    config = SimpleNamespace(
        base_model_tp_plan={
            "layers.*.wide": "colwise",
            "layers.*.back": "rowwise",
            "layers.*.odd": "a_word_of_tomorrow",
        }
    )

    @property
    def base_model(self) -> nn.Module:
        return self.model if hasattr(self, "model") else self


def test_what_a_model_says_of_itself_is_taken_where_no_names_are_known():
    base, whole = Says(), Says()
    base.layers = nn.ModuleList(
        nn.ModuleDict({"wide": nn.Linear(8, 16), "back": nn.Linear(16, 8), "odd": nn.Linear(8, 8)}) for _ in range(2)
    )
    whole.model, whole.layers = base, nn.ModuleList([nn.ModuleDict({"wide": nn.Linear(8, 16)})])
    words = {"wide": Style("colwise"), "back": Style("rowwise")}
    inside = {f"layers.{i}.{name}": style for i in range(2) for name, style in words.items()}
    assert find_plan(base, 2) == inside
    assert find_plan(whole, 2) == {f"model.{name}": style for name, style in inside.items()}


@pytest.mark.parametrize(
    ("words", "is_explained"),
    [
        ("shape '[2, 8]' is invalid for a view", True),
        ("The size of tensor a (4) must match the size of tensor b (8)", True),
        ("not enough memory", False),
    ],
)
def test_errors_of_sizes_are_explained_and_no_others(words: str, is_explained: bool):
    error, part = (
        RuntimeError(words),
        SimpleNamespace(name="0.mlp", region=SimpleNamespace(axis=SimpleNamespace(size=2))),
    )
    told: Any = part
    _explain(error, told)
    notes = getattr(error, "__notes__", [])
    assert [note.startswith("`0.mlp` runs on 1/2 of its heads and features") for note in notes] == [True] * is_explained
