"""The faults that `make mutants` puts in: one place changed, nothing that no test is to see."""

import ast
from pathlib import Path

import pytest

from tests.mutants import operators
from tests.mutants.__main__ import Results, _quotas, draw, nearest
from tests.mutants.reach import Recorded, instrument

SOURCE = b'''"""Text."""
LIMIT_S = 3.0

def f(x: int, y: int = 2, *, clamp: bool = True) -> bool:
    """Text of one."""
    assert x > 0
    if x < y and not clamp:
        raise ValueError(f"{x + 1} is too few")
    total = sum(g(x, y, order=3)) + 1
    warnings.warn("1 + 1", stacklevel=2)
    return total > 4

def __repr__() -> str:
    return 1 + 1
'''


def test_each_fault_changes_one_place_and_texts_are_left_alone():
    found = operators.mutants("f.py", SOURCE)
    changes = {(mutant.before, mutant.after) for mutant in found}
    assert changes == {
        ("x < y and not clamp", "not (x < y and (not clamp))"),
        ("x < y and not clamp", "(x < y or not clamp)"),
        ("x < y and not clamp", "(x < y)"),
        ("x < y and not clamp", "(not clamp)"),
        ("x < y", "(x <= y)"),
        ("not clamp", "(clamp)"),
        ('raise ValueError(f"{x + 1} is too few")', "pass"),
        ("sum(g(x, y, order=3)) + 1", "(sum(g(x, y, order=3)) - 1)"),
        ("sum(g(x, y, order=3))", "max(g(x, y, order=3))"),
        ("g(x, y, order=3)", "g(x, y)"),
        ("g(x, y, order=3)", "g(y, x, order=3)"),
        ("3", "4"),
        ("1", "2"),
        ("total > 4", "(total >= 4)"),
        ("4", "5"),
    }
    for mutant in found:
        text = mutant.apply(SOURCE)
        ast.parse(text)
        assert text != SOURCE and text[: mutant.start] == SOURCE[: mutant.start]
        assert text.endswith(SOURCE[mutant.end :])


def test_a_fault_is_named_by_its_words_and_not_by_its_line():
    names = [mutant.key for mutant in operators.mutants("f.py", SOURCE)]
    assert names == [mutant.key for mutant in operators.mutants("f.py", b"\n\n" + SOURCE)]
    assert len(set(names)) == len(names) and "f.py::f: x < y -> (x <= y)" in names


@pytest.mark.parametrize(
    ("text", "after"), [("while x:\n    break", "continue"), ("for i in x:\n    continue", "break")]
)
def test_loops_go_on_or_end(text: str, after: str):
    assert after in [mutant.after for mutant in operators.mutants("f.py", text.encode())]


def test_what_only_a_gpu_runs_is_left_out():
    text = b"def f(x):\n    if torch.cuda.is_available():\n        x = x + 1\n    return g(x, 2)"
    assert {mutant.before for mutant in operators.mutants("f.py", text)} == {"2", "g(x, 2)"}


def test_a_draw_is_the_seed_s_and_a_longer_one_begins_with_it():
    few, again, more, other = (draw(seed, n, ("failure",)) for seed, n in [(0, 10), (0, 10), (0, 20), (1, 10)])
    assert len(few) == 10 and few == again == more[:10] != other
    assert len({(mutant.path, mutant.function) for mutant in more}) == 20
    assert _quotas({"a": 900, "b": 100}, 8) == {"a": 6, "b": 2}


def test_the_nearest_tests_come_first_and_only_those_that_reach_the_fault():
    mutant = operators.mutants("lightning_parallel/zero/norms.py", SOURCE)[0]
    here = ("lightning_parallel/zero/norms.py", "f", mutant.statement)
    other = {("lightning_parallel/zero/norms.py", "g", i) for i in range(900)}
    far = Recorded(["tests/trainer/test_fits.py::test_it"], 3.0, {here} | other)
    near = Recorded(["tests/unit/test_sums.py::test_it"], 0.1, {here})
    named = Recorded(["tests/ranks/test_norms.py::test_it"], 0.2, {here})
    elsewhere = Recorded(["tests/unit/test_norms.py::test_it"], 0.1, other)
    assert nearest(mutant, [far, elsewhere, near, named]) == [named, near, far]


def test_a_copy_tells_which_statements_it_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "lightning_parallel"
    package.mkdir()
    (package / "small.py").write_text(
        "def f(x):\n    'Text.'\n    if x:\n        y = 1\n    elif x == 0:\n        y = 2\n    return y"
    )
    places = instrument(tmp_path)
    assert [number for _, function, number in places if function == "f"] == [0, 1, 2, 3, 4]
    (tmp_path / "_mutants_seen.py").write_text("seen = bytearray(5)")
    monkeypatch.syspath_prepend(str(tmp_path))
    space: dict = {}
    exec((package / "small.py").read_text(), space)
    assert space["f"](3) == 1 and list(space["__seen__"]) == [1, 1, 0, 0, 1]


def test_the_last_result_of_a_fault_counts(tmp_path: Path):
    mutant, path = operators.mutants("f.py", SOURCE)[0], tmp_path / "seed-0.jsonl"
    Results(path).add(mutant, killed=False)
    Results(path).add(mutant, killed=True)
    found = Results(path).of(mutant)
    assert found is not None and found["killed"] and found["key"] == mutant.key
