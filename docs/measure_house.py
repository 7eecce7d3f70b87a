"""Numbers that say how easily a reader finds his way in the package: ``python docs/measure_house.py``.

Counted from the source and from the classes themselves, but for a batch's way, which is what the call stack says when
the first forward of the user's module runs in one process.
"""

import ast
import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "lightning_parallel"
OTHERS_PROTECTED = ("_foreach_",)  # torch's, documented by use
MANY = 8  # parameters of a constructor


def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def short(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def classes(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in trees.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def own_chains() -> dict[str, list[str]]:
    """Of each public strategy: the classes of this package that it consists of."""
    strategies = importlib.import_module("lightning_parallel.strategies")
    kinds = [getattr(strategies, name) for name in strategies.__all__]
    return {
        kind.__name__: [base.__name__ for base in kind.__mro__ if base.__module__.startswith(PACKAGE.name)]
        for kind in kinds
    }


def bases_of_one(trees: dict[Path, ast.Module]) -> list[str]:
    """Classes of the package with exactly one subclass in it."""
    found = list(classes(trees))
    subclasses = Counter(ast.unparse(base).split("[")[0].split(".")[-1] for _, node in found for base in node.bases)
    return sorted({node.name for _, node in found if subclasses[node.name] == 1})


def large_constructors(trees: dict[Path, ast.Module], public: set[str]) -> list[tuple[int, str]]:
    """Constructors (of dataclasses, too) with more parameters than `MANY`, but for the public strategies'."""
    found = []
    for path, node in classes(trees):
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        if "__init__" in methods:
            said = methods["__init__"].args
            count = len(said.posonlyargs) + len(said.args) + len(said.kwonlyargs) - 1
        elif any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
            fields = [
                item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item)
            ]
            count = sum("init=False" not in ast.unparse(item) for item in fields)
        else:
            continue
        if count > MANY and node.name not in public:
            found.append((count, f"{short(path)}: {node.name}"))
    return sorted(found, reverse=True)


def private_names(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Private names of others outside of ``compat/``: {name: files that use it}.

    Counted are imports and attributes (also as text of `getattr` and its like) that begin with one underscore and that
    the package does not define. Members of `self`, `cls` and `super()` are protected members that a class inherits.
    """
    own: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__slots__" for t in node.targets):
                own |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if path.is_relative_to(PACKAGE / "compat"):
            continue
        for name in _said(tree):
            if name.startswith("_") and not name.startswith(("__", *OTHERS_PROTECTED)) and name not in own:
                found[name].add(short(path))
    return found


def _said(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(PACKAGE.name):
            yield from [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        ):
            said = node.args[1]
            if isinstance(said, ast.Constant) and not _is_own(node.args[0]):
                yield str(said.value)


def _is_own(node: ast.expr) -> bool:
    return getattr(node, "id", "") in ("self", "cls") or ast.unparse(node).startswith("super()")


def two_meanings(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Class names (leading underscores aside) that several classes have."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, node in classes(trees):
        homes[node.name.lstrip("_")].append(short(path))
    return {name: files for name, files in homes.items() if len(files) > 1}


def cycles(trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Modules that import each other in a circle, counting imports for type checkers and within functions."""
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in trees
    }
    edges = {name: imported(tree, set(names)) - {name} for name, tree in zip(names, trees.values(), strict=True)}
    edges[PACKAGE.name] = set()  # it gives names of modules below it when they are asked for
    reach: dict[str, set[str]] = {}
    for name in names:
        seen: set[str] = set()
        todo = [name]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        reach[name] = seen
    circles = {tuple(sorted(m for m in reach[name] if name in reach[m])) for name in names if name in reach[name]}
    return [list(circle) for circle in sorted(circles)]


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full & modules or {node.module}
    return found & modules


def way_of_a_batch() -> tuple[list[str], list[str]]:
    """Functions on the stack between the strategy's `training_step` and the user's first forward, and files visited."""
    from lightning.pytorch import Trainer

    from lightning_parallel import PipelineStrategy
    from lightning_parallel.demo import GPT, TextDataModule

    stack: list[str] = []
    visited: dict[str, None] = {}

    def profile(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "demo"):
            visited[short(path)] = None

    class Watched(GPT):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.training and not stack:
                sys.setprofile(None)
                frame: Any = sys._getframe()
                while frame is not None:
                    path = Path(frame.f_code.co_filename)
                    if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "demo"):
                        stack.append(f"{short(path)}: {frame.f_code.co_name}")
                        if frame.f_code.co_name == "training_step" and "strategies" in str(path):
                            break
                    frame = frame.f_back
            return super().forward(*args, **kwargs)

    class Strategy(PipelineStrategy):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if not stack:
                sys.setprofile(profile)
            return super().training_step(*args, **kwargs)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, limit_train_batches=1, strategy=Strategy(num_microbatches=2), **quiet
    )
    trainer.fit(Watched(), TextDataModule())
    return stack[::-1], list(visited)


def main() -> None:
    trees = sources()
    chains = own_chains()
    print(f"{len(trees)} files, {len(list(classes(trees)))} classes\n")
    print("Own classes in the MRO of each public strategy (wanted: at most 3)")
    for name, chain in chains.items():
        print(f"  {len(chain):3} {name}: {' < '.join(chain[1:])}")
    of_one = bases_of_one(trees)
    print(f"\nClasses with exactly one subclass (wanted: at most 10): {len(of_one)}\n  {', '.join(of_one)}")
    large = large_constructors(trees, set(chains))
    print(f"\nConstructors with more than {MANY} parameters (wanted: 0): {len(large)}")
    print("\n".join(f"  {count:3} {name}" for count, name in large))
    private = private_names(trees)
    files = set().union(*private.values())
    print(f"\nPrivate names of others outside compat/ (wanted: 0): {len(private)} in {len(files)} files")
    print("\n".join(f"  {name}: {', '.join(sorted(where))}" for name, where in sorted(private.items())))
    double = two_meanings(trees)
    print(f"\nClass names with two meanings (wanted: 0): {len(double)}")
    print("\n".join(f"  {name}: {', '.join(where)}" for name, where in sorted(double.items())))
    circles = cycles(trees)
    print(f"\nCircles of imports, those for type checkers counted (wanted: 0): {len(circles)}")
    print("\n".join(f"  {' '.join(circle)}" for circle in circles))
    stack, visited = way_of_a_batch()
    on_the_way = dict.fromkeys(line.partition(":")[0] for line in stack)
    print(f"\nA batch's way from training_step to the first forward (wanted: at most 4 files): {len(on_the_way)} files")
    print("\n".join(f"  {line}" for line in stack))
    print(f"  on the way {len(visited)} files are entered, those that return before the forward counted")


if __name__ == "__main__":
    main()
