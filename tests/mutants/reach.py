"""Which tests reach which statement, recorded once and kept.

The one idea: a copy of the package sets a byte of shared memory at each statement, which ranks that are forked from a
test, and scripts that it starts, share with it. (Tracers see one process, and slow it down.) What is kept is a file for
each file of tests, named by its text: only new and changed tests are recorded again. A statement is known by its
function and its number there, so a record holds for functions that have not changed since.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.operators import bodies, statements

Place = tuple[str, str, int]  # file, function, the statement's number

_SEEN = """
import mmap, os
with open(os.environ["MUTANTS_SEEN"], "r+b") as file:
    seen = mmap.mmap(file.fileno(), 0)
"""
_SHARED = re.compile(r"^@cache", re.M)  # what tests of a file run once, for several, as no fixture does


@dataclass
class Recorded:
    """A test, or several that share what they run.

    Args:
        names: node ids.
        seconds: what they took together when they were recorded.
        reached: statements.
    """

    names: list[str]
    seconds: float = 0.0
    reached: set[Place] = field(default_factory=set)

    @property
    def file(self) -> str:
        return self.names[0].partition("::")[0]


def places_of(root: Path) -> list[Place]:
    """Every statement of the package."""
    return [
        (path, statement.function, statement.number)
        for path in _modules(root)
        for statement in statements(ast.parse((root / path).read_bytes()))
    ]


def _modules(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / "lightning_parallel").rglob("*.py"))


def instrument(root: Path) -> list[Place]:
    """Make every statement in a function of a copy's package tell that it was reached; returns the bytes' meaning."""
    places: list[Place] = []
    for path in _modules(root):
        tree = ast.parse((root / path).read_bytes())
        marked = {}
        for statement in statements(tree):
            if statement.function:
                marked[id(statement.node)] = len(places)
            places.append((path, statement.function, statement.number))
        _mark(tree.body, marked)
        at = next((i for i, node in enumerate(tree.body) if not _comes_first(node)), len(tree.body))
        tree.body.insert(at, ast.parse("from _mutants_seen import seen as __seen__").body[0])
        (root / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (root / "_mutants_seen.py").write_text(_SEEN)
    return places


def _comes_first(node: ast.stmt) -> bool:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _mark(body: list[ast.stmt], marked: dict[int, int]) -> None:
    for i in reversed(range(len(body))):
        node = body[i]
        for inner in bodies(node):
            _mark(inner, marked)
        if id(node) in marked:
            body.insert(i, ast.parse(f"__seen__[{marked[id(node)]}] = 1").body[0])


class Recorder:
    """A plugin of pytest that writes down which bytes each test set."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.tests = memory, dict[str, Any]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.shared = {item.nodeid: _fixtures_of_its_file(item) for item in items}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.memory[:] = bytes(len(self.memory))
        self.tests[nodeid] = {"seconds": 0.0, "passed": True, "reached": [], "shared": self.shared[nodeid]}

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self.tests[report.nodeid]
        entry["seconds"] += report.duration
        entry["passed"] &= report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        set_bytes = self.memory[:]
        self.tests[nodeid]["reached"] = [i for i, byte in enumerate(set_bytes) if byte]


def _fixtures_of_its_file(item: Any) -> list[str]:
    """The fixtures of a test that are set up once for all tests of its file."""
    found = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return sorted(name for name, of in found.items() if of[-1].scope != "function" and ".py" in of[-1].baseid)


class Records:
    """What was recorded, in a folder that is kept.

    Args:
        folder: of the records.
        root: of the repository.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        folder.mkdir(parents=True, exist_ok=True)

    def path_of(self, file: str) -> Path:
        """Where the record of a file of tests, as it is now, is or will be."""
        text = hashlib.sha256((self.root / file).read_bytes()).hexdigest()[:16]
        return self.folder / f"{file.replace('/', '.')}-{text}.json"

    def missing(self, files: Iterable[str]) -> list[str]:
        return [file for file in files if not self.path_of(file).exists()]

    def add(self, file: str, tests: dict[str, Any], places: Sequence[Place]) -> None:
        """Keep what a file's tests reached."""
        table: dict[str, int] = {}
        by_function: dict[str, Any] = {}
        for name, test in tests.items():
            reached: dict[int, list[int]] = {}
            for i in test["reached"]:
                path, function, number = places[i]
                key = table.setdefault(f"{path}::{function}", len(table))
                reached.setdefault(key, []).append(number)
            by_function[name] = {**test, "reached": reached}
        partial = self.path_of(file).with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"functions": list(table), "tests": by_function}))
        partial.rename(self.path_of(file))

    def tests(self, files: Iterable[str]) -> list[Recorded]:
        """The tests that passed, those together that share what they run."""
        found: list[Recorded] = []
        for file in files:
            if self.path_of(file).exists():
                found += self._tests_of(file)
        return found

    def _tests_of(self, file: str) -> list[Recorded]:
        record = json.loads(self.path_of(file).read_text())
        functions = [tuple(name.split("::")) for name in record["functions"]]
        cached = bool(_SHARED.search((self.root / file).read_text()))
        groups: dict[str, Recorded] = {}
        for name, test in record["tests"].items():
            if not test["passed"]:
                continue
            group = _group(name, test.get("shared", []), cached)
            made = groups.setdefault(group, Recorded([]))
            made.names.append(name)
            made.seconds += test["seconds"]
            made.reached |= {
                (*functions[int(key)], number) for key, numbers in test["reached"].items() for number in numbers
            }
        return list(groups.values())


def _group(name: str, fixtures: Sequence[str], cached: bool) -> str:
    """Tests that share what they run: a suite's launch for a strategy, a fixture, whatever their file keeps.

    Example:
        >>> _group("tests/trainer/conformance/test_logging.py::test_same[zero_2-in_every_hook]", [], False)
        'tests/trainer/conformance/test_logging.py zero_2'
        >>> _group("tests/trainer/test_zero.py::test_losses[1]", ["outcomes"], False)
        'tests/trainer/test_zero.py outcomes'
        >>> _group("tests/trainer/test_zero.py::test_words", [], False)
        'tests/trainer/test_zero.py::test_words'
    """
    file, _, rest = name.partition("::")
    if "/conformance/" in file and "[" in rest:
        return f"{file} {rest.partition('[')[2].partition('-')[0]}"
    if fixtures:
        return f"{file} {' '.join(fixtures)}"
    return file if cached else name


def files_of_tests(root: Path) -> list[str]:
    """Files whose tests may see a fault, cheapest layer first, and modules with examples."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tests", "lightning_parallel"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    found = [path for path in listed if (root / path).exists()]
    layers = ("tests/unit/", "tests/ranks/", "tests/trainer/", "tests/bugs/")
    tests = [p for layer in layers for p in found if p.startswith(layer) and Path(p).name.startswith("test_")]
    examples = [
        p for p in found if p.startswith("lightning_parallel/") and p.endswith(".py") and ">>> " in _text(root / p)
    ]
    return [*examples, *tests]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def warm() -> None:
    """Import what tests import, but nothing of this repository: processes forked from here need not."""
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    for name in _IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name} is not imported beforehand: {error!r}", file=sys.stderr)


_IMPORTS = (
    "pytest", "hypothesis", "numpy", "torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "torch.distributed.pipelining", "torch._dynamo", "torch.testing", "torchmetrics",
    "torchmetrics.classification", "lightning", "lightning.pytorch", "lightning.pytorch.cli",
    "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.demos.boring_classes", "scipy.stats",
    "matplotlib.pyplot", "zmq", "yaml", "jsonargparse", "tensorboard", "tensorboardX", "transformers",
    "sklearn.datasets", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert", "deepspeed", "safetensors.torch", "nbformat",
)  # fmt: skip
