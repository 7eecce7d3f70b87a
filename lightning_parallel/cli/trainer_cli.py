"""LightningCLI that knows this package's classes by their short names and answers mistakes with them.

Lightning types the strategy as ``str | Strategy``, and any text is a ``str``: a misspelt class name travels on as a
name and is refused later by somebody who has never heard of our classes. Here the type is ``Strategy | StrategyName``,
where a name is one that the registry has; what is neither is answered at once.
"""

import difflib
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_parallel import callbacks, demo, strategies
from lightning_parallel.cli.warnings import ignore_third_party_warnings
from lightning_parallel.parameter_server import filters
from lightning_parallel.parameter_server.consistency import Consistency
from lightning_parallel.parameter_server.filters import Precision, Selector
from lightning_parallel.parameter_server.updates import Update


class StrategyName(str):
    """A strategy string that Lightning's registry has, such as ``pipeline_1f1b`` or ``ddp``, or ``auto``."""


def strategy_classes() -> dict[str, type]:
    """Our strategies by short name, without the abstract ones."""
    return {name: kind for name, kind in _classes(strategies).items() if not inspect.isabstract(kind)}


def strategy_strings() -> list[str]:
    """Our strategy strings, as registered with Lightning."""
    return sorted(name for name in StrategyRegistry if _is_ours(StrategyRegistry[name]["strategy"]))


def describe_names() -> str:
    """Short names of our classes and our strategy strings, a line a kind."""
    lines = {
        "strategies": strategy_classes(),
        "strings": strategy_strings(),
        "callbacks": _classes(callbacks),
        "demo": _classes(demo),
    }
    return "\n".join(f"  {kind:<10} {', '.join(names) or '-'}" for kind, names in lines.items())


def run(arguments: list[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict`` with its options."""
    ignore_third_party_warnings()
    _teach_parsers()
    with _as_arguments(arguments):
        _CLI(trainer_class=_Trainer, parser_class=_Parser, save_config_kwargs={"overwrite": True})
    return 0


def parser() -> LightningArgumentParser:
    """What reads the options of ``fit``, and nothing runs: to check a file."""
    _teach_parsers()
    with _as_arguments(["--model", "GPT"]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Lightning's calls of jsonargparse
        return _ConfigReader(
            trainer_class=_Trainer, parser_class=_Parser, run=False, seed_everything_default=False
        ).parser


@contextmanager
def _as_arguments(arguments: list[str]) -> Iterator[None]:
    """While LightningCLI reads them; processes that a strategy starts are given these too."""
    argv, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        yield
    finally:
        sys.argv = argv


def _teach_parsers() -> None:
    """What a strategy string is; dataclasses of the parameter server may be given as one of their subclasses."""
    import jsonargparse
    from jsonargparse.typing import register_type

    register_type(
        StrategyName,
        str,
        _strategy_name,
        type_check=lambda value, _: _is_strategy_name(value),
        fail_already_registered=False,
    )
    # Older parsers need no telling.
    tell = getattr(jsonargparse, "set_parsing_settings", None)
    if tell is not None and "subclasses_enabled" in inspect.signature(tell).parameters:
        tell(subclasses_enabled=[Update, Consistency, Precision, Selector])


# A plain text, so that it prints as one in YAML.
_AUTO = cast(StrategyName, "auto")


class _Trainer(Trainer):
    """The Trainer, with a strategy that is one of Lightning's or of ours or a registered name."""

    def __init__(self, *args: Any, strategy: Strategy | StrategyName = _AUTO, **kwargs: Any) -> None:
        super().__init__(*args, strategy=strategy, **kwargs)


class _CLI(LightningCLI):
    """LightningCLI that answers with what a strategy says of its arguments."""

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:  # of a strategy, or a name: one refused its arguments
            if "- Not of type StrategyName" not in str(error) or error.__cause__ is None:
                raise
            sys.stderr.write(f"lightning-parallel: {error.__cause__}\n")
            sys.exit(2)


class _ConfigReader(LightningCLI):
    """LightningCLI that makes nothing of what it has read."""

    def instantiate_classes(self) -> None:
        """Nothing."""


class _Parser(LightningArgumentParser):
    """A parser that says which of our names was probably meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        sys.stderr.write(f"lightning-parallel: {explain(message)}\n")
        sys.exit(2)


def explain(message: str) -> str:
    """Our answer to an error of the parser: what was given, what there is, what was probably meant."""
    strategy = re.search(r"- Not of type StrategyName: (.*?)\n  Given value type", message, re.DOTALL)
    if strategy:
        first, _, rest = strategy[1].partition("\n")
        return f"{first}\n{textwrap.dedent(rest)}"
    option = re.search(r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected", message)
    if option:
        return f"{message}\n{explain_option((option[1] or option[2]).split('.')[-1])}"
    argument = re.search(r'Parser key "(\w+)":', message) or re.search(r"arguments are required: (\w+)$", message)
    owners = [name for name, takes in _arguments().items() if argument and argument[1] in takes]
    if argument and owners:
        return f"{message}\n{argument[1]} is an argument of {', '.join(owners)}."
    given = re.search(r"Given value: (.*)", message) or re.search(r"[Uu]nrecognized arguments: (.*)", message)
    return f"{message}\n{_nearest_class(given[1])}" if given else message


def explain_strategy(given: Any) -> str:
    """Our answer to a strategy that is none.

    Example:
        >>> print(explain_strategy("pipeline_1f1"))  # doctest: +ELLIPSIS
        trainer.strategy was given 'pipeline_1f1', which is not a strategy. Did you mean pipeline_1f1b?
        ...
    """
    shape = "a list; a run has one strategy" if isinstance(given, list) else "which is not a strategy"
    if isinstance(given, dict) and "class_path" not in given:
        shape = "which has no class_path"
    near = _nearest(_words(given), [*strategy_classes(), *strategy_strings(), *StrategyRegistry])
    return "\n".join(
        [
            f"trainer.strategy was given {given!r}, {shape}.{f' Did you mean {near}?' if near else ''}",
            f"Strategies of lightning_parallel: {', '.join(strategy_classes())}.",
            f"Strategy strings of lightning_parallel: {', '.join(strategy_strings())}.",
            "Those of Lightning (auto, ddp, fsdp, ...) work too. In YAML, either of",
            "  strategy: pipeline_1f1b",
            "  strategy:",
            "    class_path: PipelineStrategy",
            "    init_args: {schedule: 1f1b, num_microbatches: 8}",
        ]
    )


def explain_option(given: str) -> str:
    """Our answer to an argument that a class does not take: the nearest one, whose it is, and what that class takes."""
    takers = _arguments()
    near = _nearest([given], [argument for takes in takers.values() for argument in takes], cutoff=0.7)
    owners = [name for name, takes in takers.items() if near in takes]
    lines = [f"Did you mean {near}?"] if near not in (None, given) else []
    lines += [
        f"{name} takes: {', '.join(takers[name])}." for name in owners or [*strategy_classes(), *_classes(filters)]
    ]
    return "\n".join(lines)


def _strategy_name(value: Any) -> str:
    if not _is_strategy_name(value):
        raise ValueError(explain_strategy(value))
    return value


def _is_strategy_name(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("auto", *StrategyRegistry)


def _nearest_class(given: str) -> str:
    classes = {**_classes(callbacks), **_classes(demo), **strategy_classes()}
    near = _nearest(re.findall(r"\w+", given), list(classes))
    return (f"Did you mean {near}?\n" if near else "") + f"Known by short name:\n{describe_names()}"


def _nearest(words: list[str], names: list[str], cutoff: float = 0.6) -> str | None:
    """The name closest to any of the words, letter case aside."""
    lowered = {name.lower(): name for name in reversed(names)}
    for word in words:
        near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=cutoff)
        if near:
            return lowered[near[0]]
    return None


def _words(given: Any) -> list[str]:
    """The texts in a value that may name a class, the last part of a dotted path alone."""
    if isinstance(given, list | tuple):
        return [word for part in given for word in _words(part)]
    if isinstance(given, dict):
        return [word for part in given.values() for word in _words(part)]
    return [str(given).split(".")[-1]]


def _classes(module: Any) -> dict[str, type]:
    return {
        name: getattr(module, name) for name in getattr(module, "__all__", ()) if inspect.isclass(getattr(module, name))
    }


def _arguments() -> dict[str, list[str]]:
    """What each of our classes takes, by short name."""
    classes = {**strategy_classes(), **_classes(callbacks), **_classes(demo), **_classes(filters)}
    return {name: _takes(kind) for name, kind in classes.items()}


def _takes(kind: type) -> list[str]:
    """A class's own arguments, and those that it hands on to the classes that it is made of."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if not base.__module__.startswith("lightning_parallel."):
            continue
        parameters = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}  # type: ignore[misc]
        found |= dict.fromkeys(name for name in parameters if name not in ("self", "args", "kwargs"))
        if parameters and "kwargs" not in parameters:
            break
    return list(found)


def _is_ours(factory: Any) -> bool:
    return str(getattr(factory, "__module__", "")).startswith("lightning_parallel.")
