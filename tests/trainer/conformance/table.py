"""Write ``docs/features.md``, what the suite says of every strategy: ``python -m tests.trainer.conformance.table``.

The one idea: what runs, what is refused and what nobody tries is already in the suite's entries and scenarios; nothing
is run here. ``tests/unit/test_docs.py`` says when the page is older than the suite.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.trainer.conformance.runs import Suite
from tests.trainer.conformance.strategies import STRATEGIES, Entry
from tests.trainer.conformance.test_refused import REFUSED

PAGE = Path(__file__).parents[3] / "docs" / "features.md"
TITLES = {
    "test_loops": "Loops",
    "test_logging": "Logging",
    "test_callbacks": "Callbacks",
    "test_weight_callbacks": "Callbacks that hold weights, and summaries",
    "test_optimization": "Between backward and optimizer",
    "test_models": "Models and precisions",
    "test_loggers": "Loggers and progress bars",
}
RUNS, NOT_TRIED = "runs", ""
INTRO = """\
# What combines with what

<!-- Written by `python -m tests.trainer.conformance.table` from tests/trainer/conformance. -->

What [the suite](../tests/trainer/conformance) that every strategy has to pass says of each, feature by feature:

* **runs**: tried beside one process: losses, weights, optimizer state and all that is logged are equal on every rank;
* **[number]**: refused in words, which are tried too, and stand below;
* nothing: not tried here. A strategy that shares its code with one that is tried runs a part of the suite; what makes
  no sense for a strategy, or has a test of its own, is left out too. `make test` tries column A, `make test-slow` all.

What else is refused is in [the README](../README.md#what-it-does-not-do). Options of schedules, sizes of meshes,
servers and GPUs have tests of their own and are in no table here; `pipeline_auto` takes one of the other schedules,
and `pipeline_terapipe` has [tests of its own](../tests/trainer/test_token_slices.py).
"""


@dataclass
class Column:
    """Strategies of which the suite says the same: entries, those of one strategy together, and marks by feature."""

    strategies: list[list[Entry]]
    marks: Mapping[str, str]
    letter: str = ""


def page() -> str:
    """The page, as it should be now."""
    words: dict[str, int] = {}
    columns = columns_of([Column([entries], marks_of(entries, words)) for entries in same_strategies()])
    parts = [INTRO, "## Strategies", "", "| | strategy | ranks | with |", "|---|---|---|---|"]
    for column in columns:
        parts += [f"| {'' if i else column.letter} | {row} |" for i, row in enumerate(rows_of(column))]
    for title, features in sections().items():
        parts += ["", f"## {title}", "", *grid(features, columns)]
    parts += ["", "## What is said", ""]
    parts += [f"{number}. `` {text} ``" for text, number in words.items()]
    return "\n".join(parts) + "\n"


def sections() -> dict[str, list[Callable[..., Any]]]:
    """The scenarios of the suite by what they are about."""
    found: dict[str, list[Callable[..., Any]]] = {}
    for module, title in TITLES.items():
        suite: Suite = import_module(f"tests.trainer.conformance.{module}").suite
        found[title] = list(suite.scenarios)
    return {**found, "What some strategy refuses": list(REFUSED)}


def same_strategies() -> list[list[Entry]]:
    """Entries of the suite, those of one strategy with the same options together."""
    found: dict[str, list[Entry]] = {}
    for entry in STRATEGIES:
        found.setdefault(f"{entry.name} {entry.ranks} {entry.options}", []).append(entry)
    return list(found.values())


def marks_of(entries: Sequence[Entry], words: dict[str, int]) -> dict[str, str]:
    """What becomes of every feature under a strategy; the words of refusals are numbered as they come."""
    marks: dict[str, str] = {}
    for module in TITLES:
        suite: Suite = import_module(f"tests.trainer.conformance.{module}").suite
        marks |= {scenario.__name__: RUNS for entry in entries for scenario in suite.of(entry)}
    for entry in entries:
        for scenario in () if entry.core else REFUSED:
            said = entry.refuses.get(scenario.__name__)
            marks[scenario.__name__] = RUNS if said is None else f"[{words.setdefault(whole(said), len(words) + 1)}]"
    return marks


def whole(said: str) -> str:
    """Words of a refusal as text, marked where the suite holds a part of them."""
    return ("" if said[0].isupper() else "... ") + said.strip() + ("" if said.rstrip().endswith(".") else " ...")


def columns_of(each: Sequence[Column]) -> list[Column]:
    """The columns of all strategies, where equal ones are one; a letter each."""
    found: list[Column] = []
    for column in each:
        equal = [other for other in found if other.marks == column.marks]
        if equal:
            equal[0].strategies += column.strategies
        else:
            found.append(column)
    for column, letter in zip(found, string.ascii_uppercase, strict=False):
        column.letter = letter
    return found


def rows_of(column: Column) -> list[str]:
    """The strategies of a column: strings, ranks, options; those that divide nothing of a small model are left out."""
    alike: dict[tuple[int, str], list[str]] = {}
    for entry, *_ in column.strategies:
        said = {name: value for name, value in entry.options.items() if name not in ("bucket_mb", "lease")}
        options = ", ".join(f"{name}={value!r}" for name, value in said.items())
        alike.setdefault((entry.ranks, f"`{options}`" if options else ""), []).append(f"`{entry.name}`")
    return [f"{', '.join(names)} | {ranks} | {options}" for (ranks, options), names in alike.items()]


def grid(features: Sequence[Callable[..., Any]], columns: Sequence[Column]) -> list[str]:
    """The table of some features, a row each."""
    lines = [f"| | {' | '.join(column.letter for column in columns)} |", "|---|" + "---|" * len(columns)]
    for feature in features:
        marks = " | ".join(column.marks.get(feature.__name__, NOT_TRIED) for column in columns)
        lines.append(f"| {feature.__name__.replace('_', ' ')} | {marks} |")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
