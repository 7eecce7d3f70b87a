"""A schedule's name with its options in one string: ``interleaved_1f1b:v=3``.

The one idea: what a user writes in YAML or on the command line, what ``make`` takes and what a ``Schedule`` is called
are one text, so that a name found in a log makes the schedule again. Which options a name has is said by the
parameters of its generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lightning_parallel.pipeline.schedule import Schedule

Generator = Callable[..., Schedule]


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Split ``name:option=value,option=value``; hyphens in the name are underscores, case does not matter.

    Raises:
        ValueError: an option has no value or one that is not a number or a truth value.

    Example:
        >>> parse("Interleaved-1F1B:v=3")
        ('interleaved_1f1b', {'v': 3})
        >>> parse("chimera:pairs=2")
        ('chimera', {'pairs': 2})
    """
    name, _, rest = text.strip().lower().partition(":")
    options = {}
    for word in filter(None, (word.strip() for word in rest.split(","))):
        key, found, value = word.partition("=")
        if not found:
            raise ValueError(
                f"Schedule {text!r}: {word!r} is no option. Write name:option=value, such as 1f1b or x:v=2."
            )
        options[key.strip()] = _value(text, value.strip())
    return name.strip().replace("-", "_"), options


def _value(text: str, value: str) -> Any:
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ValueError(f"Schedule {text!r}: {value!r} is no value for an option. Use a number, true or false.")


def write(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of ``parse``.

    Example:
        >>> write("interleaved_1f1b", {"v": 3, "group": 6}), write("gpipe", {})
        ('interleaved_1f1b:v=3,group=6', 'gpipe')
    """
    words = [f"{key}={str(value).lower()}" for key, value in options.items()]
    return f"{name}:{','.join(words)}" if words else name


def options_of(generator: Generator) -> dict[str, Any]:
    """The options of a generator and their defaults: its parameters after ranks and micro-batches."""
    parameters = list(inspect.signature(generator).parameters.values())[2:]
    return {parameter.name: parameter.default for parameter in parameters}


def require(name: str, right: bool, what: str, remedy: str) -> None:
    """Raise ``ValueError`` in words unless ``right``."""
    if not right:
        raise ValueError(f"Schedule {name!r} {what}. {remedy}")
