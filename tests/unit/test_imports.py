"""The import rule: arrows point one way, strategies and callbacks -> glue -> machinery -> torch.

The machinery names Lightning nowhere; of the parameter server, `trainer/` alone does. Glue and callbacks never name a
strategy, nothing but the command line needs jsonargparse, and no modules import each other in a circle. Read from the
source, so that an import inside a function or for type checkers counts too.
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import imported_anew

PACKAGE = Path(__file__).parents[2] / "lightning_parallel"
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
KNOWS_LIGHTNING = ("strategies", "callbacks", "trainer", "parameter_server/trainer", "demo")
ABOVE = tuple(f"lightning_parallel.{part.replace('/', '.')}" for part in (*KNOWS_LIGHTNING, "cli"))


def imports(source: str, module: str) -> set[str]:
    """Every dotted name that a module imports, anywhere in it, as an absolute name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names


def modules(*parts: str) -> list[Path]:
    """The files of the package's parts that exist; a part is a folder or a file."""
    files: list[Path] = []
    for part in parts:
        files += sorted((PACKAGE / part).rglob("*.py"))
        files += [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else []
    return files


def glue() -> list[Path]:
    """What stands between the machinery and Lightning's Trainer."""
    return modules("trainer", "parameter_server/trainer")


def machinery() -> list[Path]:
    """Everything but what names Lightning, the command line, and the package's own three that tie it together."""
    above = {
        *modules(*KNOWS_LIGHTNING, "cli"),
        *(PACKAGE / f"{name}.py" for name in ("__init__", "__main__", "_register")),
    }
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path not in above]


def imported_by(path: Path) -> set[str]:
    # The name of a package's __init__ keeps its last part, so that relative levels count alike.
    dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return imports(path.read_text(), dotted)


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in paths]


@pytest.mark.parametrize("path", machinery(), ids=ids(machinery()))
def test_machinery_imports_torch_and_never_lightning(path):
    names = imported_by(path)
    assert not {name for name in names if name.split(".")[0] in LIGHTNING}
    assert not {name for name in names if name.startswith(ABOVE)}


@pytest.mark.parametrize("path", modules("callbacks"), ids=ids(modules("callbacks")))
def test_callbacks_name_no_strategy(path):
    assert not {name for name in imported_by(path) if name.startswith("lightning_parallel.strategies")}


@pytest.mark.parametrize("path", glue(), ids=ids(glue()))
def test_glue_names_neither_strategies_nor_callbacks(path):
    above = ("lightning_parallel.strategies", "lightning_parallel.callbacks", "lightning_parallel.cli")
    assert not {name for name in imported_by(path) if name.startswith(above)}


def test_no_modules_import_each_other_in_a_circle():
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): imported_by(path) for path in sources()}
    names.pop(f"{PACKAGE.name}.__init__")  # it gives names of modules below it when they are asked for
    names = {name.removesuffix(".__init__"): said for name, said in names.items()}
    edges = {}
    for name, said in names.items():
        folders = {other.rpartition(".")[0] for other in said if other in names}  # `from folder import module`
        edges[name] = (said & set(names)) - folders - {name}
    while ends := [name for name in edges if not edges[name] & set(edges)]:
        for name in ends:
            del edges[name]
    while begins := set(edges).difference(*edges.values()):
        for name in begins:
            del edges[name]
    assert not edges, f"in circles, or between two: {sorted(edges)}"


@pytest.mark.parametrize("path", modules("strategies"), ids=ids(modules("strategies")))
def test_strategies_name_no_callback_and_no_command(path):
    above = ("lightning_parallel.callbacks", "lightning_parallel.cli", "lightning_parallel.demo")
    assert not {name for name in imported_by(path) if name.startswith(above)}


def test_only_the_command_line_needs_jsonargparse():
    users = {path.name for path in PACKAGE.rglob("*.py") if any("jsonargparse" in name for name in imported_by(path))}
    assert users <= {"trainer_cli.py"}


def test_importing_the_package_imports_neither_torch_nor_lightning():
    code = (
        "import sys, lightning_parallel; print([m for m in ('torch', 'lightning', 'jsonargparse') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_strategies_need_none_of_the_optional_packages():
    def told(rank: int) -> str:
        from lightning.pytorch import Trainer

        import lightning_parallel.callbacks
        import lightning_parallel.strategies

        Trainer(accelerator="cpu", devices=2, strategy="pipeline_1f1b", logger=False)
        with pytest.raises(ModuleNotFoundError) as caught:
            lightning_parallel.strategies.ParameterServerStrategy()
        return str(caught.value)

    text = imported_anew(told, without=("zmq", "deepspeed", "jsonargparse"))
    assert "pyzmq is not installed" in text and "pip install pyzmq" in text


def test_relative_imports_are_resolved():
    assert imports("from ..measure import spans", "lightning_parallel.pipeline.engine") == {
        "lightning_parallel.measure",
        "lightning_parallel.measure.spans",
    }
    assert "lightning" in imports("def f():\n    import lightning", "x")


# -- every module can be the first import ----------------------------------------------------------------------------


def test_every_module_can_be_the_first_import():
    """In a process that has imported neither this package nor Lightning, whose import registers the strategies."""
    names = [f"{PACKAGE.name}.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}" for path in sources()]
    tried, broken = imported_anew(lambda rank: first_imports(PACKAGE.name), without=())
    assert sorted(tried) == sorted(name.removesuffix(".__init__") for name in names)
    assert not broken, "\n".join(f"import {name}: {error}" for name, error in broken.items())


def sources() -> list[Path]:
    """Every module but those that are commands."""
    return [path for path in PACKAGE.rglob("*.py") if path.stem != "__main__"]


def first_imports(root: str) -> tuple[list[str], dict[str, str]]:
    """The modules of a package, and the errors of those that cannot be the first import of a process.

    To import ``a.b.c`` first is to import ``a``, then ``a.b``, then ``a.b.c``; so what modules of one folder need of
    its ``__init__`` is imported once for all of them.
    """
    tried: list[str] = []
    broken: dict[str, str] = {}

    def walk(name: str) -> None:
        tried.append(name)
        with forgotten():
            try:
                module = importlib.import_module(name)
            except Exception as error:
                missing = isinstance(error, ModuleNotFoundError) and (error.name or root).split(".")[0] != root
                if not (missing and find_spec(str(error.name)) is None):  # an optional package
                    broken[name] = f"{type(error).__name__}: {error}"
                return
            for folder in getattr(module, "__path__", ()):
                for path in sorted(Path(folder).iterdir()):
                    is_package = (path / "__init__.py").exists()
                    if is_package or (path.suffix == ".py" and path.stem not in ("__init__", "__main__")):
                        walk(f"{name}.{path.stem}")

    SourceFileLoader.get_code = compiled_once  # type: ignore[method-assign]
    sys.meta_path.insert(0, Returning({name: sys.modules[name] for name in named("lightning")}))
    for name in named("lightning"):
        del sys.modules[name]
    walk(root)
    return tried, broken


get_code = SourceFileLoader.get_code
codes: dict[str, Any] = {}


def compiled_once(loader: SourceFileLoader, name: str) -> Any:
    """A module's code, read once however often the module is imported."""
    if name not in codes:
        codes[name] = get_code(loader, name)
    return codes[name]


class Returning:
    """Brings modules back that were imported once, parents first, at no cost: a process that has not imported them."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        module = self.modules.get(name)
        return None if module is None else ModuleSpec(name, self, is_package=hasattr(module, "__path__"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "lightning":  # which imports its Trainer
            importlib.import_module("lightning.pytorch")


@contextmanager
def forgotten() -> Iterator[None]:
    """What is imported within of this package and of Lightning is not imported afterwards."""
    before, finders = named(PACKAGE.name, "lightning"), list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in named(PACKAGE.name, "lightning") - before:
        parent, _, own = name.rpartition(".")
        vars(sys.modules.get(parent, sys.modules[name])).pop(own, None)
        del sys.modules[name]


def named(*packages: str) -> set[str]:
    """Names of imported modules that lie in these packages."""
    begins = tuple(f"{package}." for package in packages)
    return {name for name in sys.modules if name in packages or name.startswith(begins)}
