"""The examples in docstrings do what they show: those of the package, and those of what tests are made of."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^\s*>>> ", re.MULTILINE)


def modules_with_examples() -> list[str]:
    """Of the package and of the tests' own helpers; files of tests themselves have none."""
    paths = [*(ROOT / "lightning_parallel").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    found = [path.relative_to(ROOT).with_suffix("") for path in paths if EXAMPLE.search(path.read_text())]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in found)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_do_what_they_show(name: str, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    flags = sum(doctest.OPTIONFLAGS_BY_NAME[flag] for flag in request.config.getini("doctest_optionflags"))
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    written = len(EXAMPLE.findall(Path(str(module.__file__)).read_text()))
    assert sum(len(test.examples) for test in found) == written, "an example is in no docstring that doctest finds"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in found:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
