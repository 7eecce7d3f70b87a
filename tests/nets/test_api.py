"""What users hold on to is what was recorded: see `api.py`, and record anew what is meant to be other."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_parallel
from lightning_parallel import strategies
from lightning_parallel.cli import trainer_cli
from tests.nets import api
from tests.pages import MARKDOWN, NOTEBOOKS, PAGES, printed_imports, printed_modules, text_of

PACKAGE = Path(lightning_parallel.__file__).parent


@pytest.fixture(scope="module")
def now():
    return api.table()


@pytest.mark.parametrize("kind", api.KINDS)
def test_it_is_as_it_was_recorded(now, kind: str):
    found = api.differences({kind: api.recorded()[kind]}, {kind: now[kind]})
    assert not found, "\n".join([*found, api.AGAIN])


def test_no_kind_is_left_out(now):
    assert list(now) == list(api.recorded()) == list(api.KINDS)
    assert all(now.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_is_there(page: Path):
    dead = [name for name in sorted(printed_imports(text_of(page))) if api.what_is(name) == api.NOTHING]
    assert not dead, f"{page.name} says {', '.join(dead)}"
    for name in printed_modules(text_of(page)):
        assert importlib.util.find_spec(f"{name}.__main__") or importlib.util.find_spec(name), name


@pytest.mark.parametrize("page", [*MARKDOWN, *NOTEBOOKS], ids=lambda page: page.name)
def test_methods_of_strategies_that_a_page_calls_are_there(page: Path):
    said = set(re.findall(r"(?:trainer\.|\b)strategy\.(\w+)\(", text_of(page)))
    public = [getattr(strategies, name) for name in strategies.__all__]
    assert not {name for name in said if not any(hasattr(kind, name) for kind in public)}


def test_every_key_in_the_source_is_recorded():
    """Of the texts ``parallel/...`` in the package: a key that only some runs log is not forgotten."""
    keys = api.recorded()["log key"]
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        for said in keys_in(source) if "parallel/" in source else ():
            assert any(re.match(f"{said}(/|$)", key) for key in keys), (
                f"{path.name} has a key {said}, which is not recorded"
            )


def keys_in(source: str) -> set[str]:
    """Patterns of the keys in a source, docstrings aside.

    Example:
        >>> sorted(keys_in('\"\"\"parallel/not\"\"\"\\nx = f"parallel/{kind}_peak/rank_{rank}", "parallel/moved"'))
        ['parallel/.+_peak/rank_.+', 'parallel/moved']
    """
    tree = ast.parse(source)
    spoken = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found, inside = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in node.values]
            inside |= {id(part) for part in node.values}
            found |= {"".join(parts)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken | inside:
            found |= {re.escape(node.value)}
    return {text for text in found if text.startswith("parallel/")}


# -- the command line takes every class path, and writes none that it does not ----------------------------------------


@pytest.fixture(scope="module")
def parser():
    return trainer_cli.parser()


def needed_by(name: str) -> list[str]:
    """Arguments that a class has to be given; all of them are numbers."""
    (lines,) = [lines for said, lines in api.recorded()["signature"].items() if said.rpartition(".")[2] == name]
    return [line.partition(":")[0] for line in lines if " = " not in line and not line.startswith("*")]


def run_with(path: str, kind: str) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """A run in which a class path stands where its kind belongs, and where that is."""
    run: dict[str, Any] = {"model": {"class_path": "GPT"}, "data": {"class_path": "TextDataModule"}, "trainer": {}}
    said = {"class_path": path, "init_args": dict.fromkeys(needed_by(path.rpartition(".")[2]), 0.5)}
    if kind in ("model", "data"):
        return {**run, kind: said}, (kind,)
    if kind in ("callback", "strategy"):
        trainer, where = {
            "callback": ({"callbacks": [said]}, ("callbacks", 0)),
            "strategy": ({"strategy": said}, ("strategy",)),
        }[kind]
        return {**run, "trainer": trainer}, ("trainer", *where)
    name, value, where = {
        "Update": ("update", said, ()), "Consistency": ("consistency", said, ()),
        "Precision": ("filters", [said], (0,)), "Selector": ("filters", [said], (0,)),
    }[kind]  # fmt: skip
    strategy = {"class_path": "ParameterServerStrategy", "init_args": {name: value}}
    return {**run, "trainer": {"strategy": strategy}}, ("trainer", "strategy", "init_args", name, *where)


def test_the_command_line_takes_every_class_path(parser):
    paths, refused = api.recorded()["class path"], {}
    for path, kind in paths.items():
        run, where = run_with(path, kind)
        try:
            value: Any = parser.parse_object(run).as_dict()
        except SystemExit as error:
            refused[path] = error
            continue
        for key in where:
            value = value[key]
        if paths.get(value["class_path"]) != kind:
            refused[path] = f"is written as {value['class_path']}, which is not recorded"
    assert not refused
