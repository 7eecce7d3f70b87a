"""What users hold on to, as one table of plain text: public names, signatures, strings, keys, flags, printed paths.

``tests/nets/api.json`` is the table as it was recorded, `test_api.py` compares it with what the package says now, and
``python -m tests.nets.api`` records it anew, for a change that is meant: its diff is what users will notice. What
Lightning, torch or Python bring is left out, so that the table is one for all their versions.
"""

import argparse
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning_parallel
from lightning_parallel import callbacks, cli, demo, strategies
from lightning_parallel.callbacks import CommunicationMonitor
from lightning_parallel.cli import consolidate_command, memory_command, schedule_command, trainer_cli
from lightning_parallel.degrees import AXES
from lightning_parallel.measure import calls, memory, memory_reading
from lightning_parallel.measure.collective_costs import Link
from lightning_parallel.measure.communication import CommunicationWatch, Moved
from lightning_parallel.measure.reading import BubbleReading
from lightning_parallel.measure.staleness import StalenessReading, StalenessSums
from lightning_parallel.parameter_server.consistency import Consistency
from lightning_parallel.parameter_server.filters import Precision, Selector
from lightning_parallel.parameter_server.updates import Update
from lightning_parallel.strategies import registry
from tests.pages import PAGES, printed_imports, printed_modules, text_of

RECORDED = Path(__file__).with_suffix(".json")
AGAIN = "If this is meant, record it with `python -m tests.nets.api` and say it in CHANGELOG.md."
HOMES = ("", ".strategies", ".callbacks", ".demo", ".checkpoint", ".parameter_server", ".parameter_server.filters",
".measure",
         ".pipeline", ".pipeline.schedules")  # fmt: skip
RULES = (Update, Consistency, Precision, Selector)  # given by class path to ParameterServerStrategy
NOTHING = "nothing"
Table = dict[str, dict[str, Any]]


def table() -> Table:
    """All of it as the package says it now: kind, name, fact."""
    return {kind: find() for kind, find in KINDS.items()}


def recorded() -> Table:
    """All of it as it was recorded."""
    found: Table = json.loads(RECORDED.read_text())
    return found


def differences(then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is gone, what has changed and what is new, a sentence each.

    Example:
        >>> differences({"name": {"a": "a class", "b": ["x", "y: int = 1"]}}, {"name": {"b": ["y: int = 2"], "c": ""}})
        ['name a is gone', 'name b has lost `x`', 'name b has `y: int = 2` for `y: int = 1`', 'name c is new']
    """
    found = []
    for kind in {**then, **now}:
        before, after = then.get(kind, {}), now.get(kind, {})
        for name in {**before, **after}:
            if name not in after:
                found.append(f"{kind} {name} is gone")
            elif name not in before:
                found.append(f"{kind} {name} is new")
            elif before[name] != after[name]:
                found += [f"{kind} {name} {text}" for text in _changes(before[name], after[name])]
    return found


def _changes(before: Any, after: Any) -> list[str]:
    """What differs between two facts, parameter by parameter where they are signatures or flags."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return [f"is `{after}`, was `{before}`"]
    old, new = ({_word(line): line for line in lines} for lines in (before, after))
    found = [f"has lost `{line}`" for word, line in old.items() if word not in new]
    found += [f"has `{new[word]}` for `{line}`" for word, line in old.items() if new.get(word, line) != line]
    found += [f"has a new `{line}`" for word, line in new.items() if word not in old]
    return found or [f"has its parameters in another order: {', '.join(new)}; they were {', '.join(old)}"]


def _word(line: str) -> str:
    return re.split(r"[:\s]", line, maxsplit=1)[0]


# -- names and signatures ------------------------------------------------------------------------------------------


def names() -> dict[str, str]:
    """Public names by the module that exports them, and what each is."""
    found = {}
    for home in HOMES:
        module = importlib.import_module(f"{lightning_parallel.__name__}{home}")
        found |= {f"{module.__name__}.{name}": _kind(getattr(module, name)) for name in sorted(module.__all__)}
    return found


def _kind(value: Any) -> str:
    for kind, is_it in (("module", inspect.ismodule), ("class", inspect.isclass), ("function", inspect.isroutine)):
        if is_it(value):
            return f"a {kind}"
    return "a value"


def what_is(name: str) -> str:
    """Of a dotted name: a module, or what a module has.

    Example:
        >>> [what_is(f"lightning_parallel{name}") for name in ("", ".demo.GPT", ".nowhere.GPT")]
        ['a module', 'a class', 'nothing']
    """
    home, _, own = name.rpartition(".")
    try:
        return _kind(importlib.import_module(name))
    except ModuleNotFoundError:
        try:
            return _kind(getattr(importlib.import_module(home), own))
        except (ModuleNotFoundError, AttributeError):
            return NOTHING


def signatures() -> dict[str, list[str]]:
    """Parameters of public functions, classes and methods, under the first name that each is exported by.

    A strategy's methods are between it and the machinery (those that pages print are held by `test_api.py`).
    """
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name in names():
        value = _at(name)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _kind(value) == "a function":
            found[name] = parameters(value)
        elif _kind(value) == "a class":
            found |= {name: parameters(value)} if "__init__" in _own(value) else {}
            if not issubclass(value, strategies.MeshStrategy):
                found |= {f"{name}.{own}": fact for own, fact in members(value).items()}
    return found


def _own(kind: type) -> set[str]:
    """Names that a class has from this package, its bases' too."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(lightning_parallel.__name__)]
    return {name for base in ours for name in vars(base)}


def members(kind: type) -> dict[str, list[str]]:
    """Public methods and properties of a class, without those that override what others wrote."""
    theirs = {
        name
        for base in kind.__mro__
        if not base.__module__.startswith(lightning_parallel.__name__)
        for name in dir(base)
    }
    found = {}
    for name in sorted(_own(kind) - theirs):
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
        if name.startswith("_") or inspect.isclass(value) or not callable(function):
            continue
        found[name] = ["a property"] if not callable(getattr(kind, name)) else parameters(function)
    return found


def parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function or class, one a line as Python writes them, without `self` and what is returned.

    Example:
        >>> def f(self, a, /, b: "torch.Tensor | None" = None, *rest: int, c=len): ...
        >>> parameters(f)
        ['a (by position)', 'b: Tensor | None = None', '*rest: int', 'c = <len> (by name)']
    """
    told = {
        inspect.Parameter.POSITIONAL_ONLY: ("", " (by position)"),
        inspect.Parameter.POSITIONAL_OR_KEYWORD: ("", ""),
        inspect.Parameter.VAR_POSITIONAL: ("*", ""),
        inspect.Parameter.KEYWORD_ONLY: ("", " (by name)"),
        inspect.Parameter.VAR_KEYWORD: ("**", ""),
    }
    lines = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        before, behind = told[parameter.kind]
        annotated = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        lines.append(f"{before}{name}{annotated}{default}{behind}")
    return lines


def _annotation(annotation: Any) -> str:
    """As it is written, without the modules that names come from."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"[\w.]+\.(\w+)", r"\1", text)


def _default(value: Any) -> str:
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"<{value.__name__.strip('<>')}>"
    return re.sub(r" at 0x\w+", "", f"<{value}>" if type(value).__repr__ is object.__repr__ else repr(value))


# -- what is said in texts: strings, class paths, keys, flags --------------------------------------------------------


def strings() -> dict[str, str]:
    """What goes to ``Trainer(strategy=...)``, and what it makes."""
    return {
        string: f"{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
        for string, (kind, options) in sorted(registry.STRINGS.items())
    }


def class_paths() -> dict[str, str]:
    """What a YAML file may say as ``class_path`` of a class of ours, and of what kind the class is."""
    found = {}
    for kind, classes in {
        "model": _classes(demo, "LightningModule"),
        "data": _classes(demo, "LightningDataModule"),
        "callback": _classes(callbacks, "Callback"),
        "strategy": trainer_cli.strategy_classes(),
    }.items():
        found |= dict.fromkeys(classes, kind)
        homes = [home for home in names() if home.rpartition(".")[2] in classes]
        found |= dict.fromkeys(homes, kind)
    for rule in RULES:
        paths = [name for name in names() if _is_made_of(_at(name), rule)]
        found |= dict.fromkeys([*paths, *(path.rpartition(".")[2] for path in paths)], rule.__name__)
    return dict(sorted(found.items()))


def _at(name: str) -> Any:
    home, _, own = name.rpartition(".")
    return getattr(importlib.import_module(home), own)


def _classes(module: Any, base: str) -> list[str]:
    return [name for name in module.__all__ if base in [kind.__name__ for kind in getattr(module, name).__mro__]]


def _is_made_of(kind: Any, rule: type) -> bool:
    return inspect.isclass(kind) and issubclass(kind, rule) and not inspect.isabstract(kind) and kind is not rule


def log_keys() -> dict[str, str]:
    """What callbacks log, from readings in which everything was measured; numbers of ranks and stages as letters."""
    of = {"bubble": _bubble(), "memory": _memory(), "staleness": _staleness(), "communication": _communication()}
    keys = {re.sub(r"(rank|stage)_\d+", r"\1_N", key): name for name, values in of.items() for key in values}
    return dict(sorted(keys.items()))


def _bubble() -> Iterable[str]:
    numbers = dict.fromkeys((field.name for field in dataclasses.fields(BubbleReading)), 0.5)
    rows = dict.fromkeys(("busy", "waiting", "transfer", "shares"), (0.5, 0.5))
    return BubbleReading(**{**numbers, **rows, "step": 1}).metrics([1, 0], (0.5, 0.5))  # type: ignore[arg-type]


def _memory() -> Iterable[str]:
    table = dict.fromkeys(memory.CATEGORIES, 1)
    held = memory.RankMemory(table, table, table, 1, 1)
    states = memory_reading.ExpectedStates("stage 1", dict.fromkeys(memory_reading.STATES, 1.0), table)
    promise = memory_reading.ExpectedActivations(0, 4, 1.0)
    return memory_reading.MemoryReading(1, {0: held}, None, {0: promise}, {0: states}).metrics()


def _staleness() -> Iterable[str]:
    return StalenessReading({0: StalenessSums(), 1: StalenessSums()}, staleness=1).metrics()


def _communication() -> Iterable[str]:
    """With words in the place of what a key is made of; `key_parts` has what they stand for."""
    monitor = CommunicationMonitor(link=Link(1.0, 1.0))
    monitor.last, monitor._sizes = {("AXIS", "all_gather", "PHASE"): Moved(1, 1, 1.0)}, {"AXIS": 2}
    monitor._formula = {"all_gather": 1}
    return [key.replace("all_gather", "COLLECTIVE") for key in monitor.metrics()]


def key_parts() -> dict[str, list[str]]:
    """What AXIS, COLLECTIVE and PHASE stand for; several axes are joined by an x, and ZeRO has `replicas`."""
    monitor, arguments = CommunicationMonitor(), (None, None, None)
    monitor._watch = watch = CommunicationWatch()
    phases = [watch.phase]
    for begin in (monitor.on_before_backward, lambda *_: monitor.on_after_backward(*arguments[:2])):
        begin(*arguments)  # type: ignore[arg-type]
        phases.append(watch.phase)
    return {"AXIS": list(AXES), "COLLECTIVE": sorted({*calls._NAMES.values(), "send"}), "PHASE": phases}


def commands() -> dict[str, list[str]]:
    """Commands of ``lightning-parallel``, and the flags of those that are ours (the others are LightningCLI's)."""
    parsers = {"schedule": schedule_command, "memory": memory_command, "consolidate": consolidate_command}
    found: dict[str, list[str]] = {f"lightning-parallel {name}": [] for name in cli.COMMANDS}
    found |= {f"lightning-parallel {name}": _flags(module._parser()) for name, module in parsers.items()}
    return {**found, "lightning-parallel --version": [], "lightning-parallel --help": []}


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """A line an argument: how it is spelt, whether it takes a value, and what it is without one."""
    lines = []
    for action in parser._actions:
        spelt = "|".join(action.option_strings) or action.dest
        value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
        needed = " (required)" if action.required else ""
        default = "" if action.default in (None, argparse.SUPPRESS, False) else f" = {action.default!r}"
        lines.append(f"{spelt}{value}{needed}{default}")
    return lines


def printed(find: Callable[[str], set[str]]) -> dict[str, str]:
    """Names that pages print, and what each is; which page is not recorded, and `test_api.py` says it."""
    return {name: what_is(name) for name in sorted({name for page in PAGES for name in find(text_of(page))})}


KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "name": names,
    "signature": signatures,
    "strategy string": strings,
    "class path": class_paths,
    "log key": log_keys,
    "part of a log key": key_parts,
    "command": commands,
    "printed import": lambda: printed(printed_imports),
    "printed python -m": lambda: printed(printed_modules),
}

if __name__ == "__main__":
    RECORDED.write_text(json.dumps(table(), indent=1, ensure_ascii=False) + "\n")
    print(f"{RECORDED}: {', '.join(f'{len(facts)} of {kind}' for kind, facts in table().items())}")
