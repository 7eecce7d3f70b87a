"""Messages of the package that propose an option or a strategy, found in its source.

The one idea: a message is a text in the source, so all of them can be listed: what is raised, warned of, or put
together for that elsewhere. A message proposes what it names with a value (`num_microbatches=1`) or as a strategy.
Left out: options that reach a message by a variable.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_parallel"
_STRATEGY = r"(?:Pipeline|ZeRO|Hybrid|ParameterServer|TensorParallel)Strategy"
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[\w.+-]+(?:\([^)]*\))?|\.\.\.)"
_PROPOSES = re.compile(rf"{_STRATEGY}\([a-z_]+=|\b[a-z]\w+={_VALUE}")
_ADVICE = re.compile(r"\b(?:[Uu]se|[Ss]et|[Gg]ive|[Ss]ay|[Pp]ass|[Tt]rain|[Ww]ith|or|[Rr]un|[Ll]eave|[Aa]sk|runs)\b")
UNKNOWN = "{}"  # what a message says of the run


@dataclass(frozen=True)
class Message:
    """A text that proposes something.

    Attributes:
        key: the module and the function that it stands in, and its number there if there are several.
        text: with `UNKNOWN` in place of values.
        proposes: what it names, in order.
    """

    key: str
    text: str
    proposes: tuple[str, ...]


def messages() -> list[Message]:
    """All of the package's."""
    return [message for path in sorted(PACKAGE.rglob("*.py")) for message in messages_in(path)]


def messages_in(path: Path) -> Iterator[Message]:
    """Those of one file."""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    counts: dict[str, int] = {}
    for where, text in _texts(ast.parse(path.read_text()), module):
        proposes = tuple(dict.fromkeys(m.group() for m in _PROPOSES.finditer(text) if not m.group().endswith(UNKNOWN)))
        if proposes and _ADVICE.search(text):
            counts[where] = counts.get(where, 0) + 1
            yield Message(where if counts[where] == 1 else f"{where}#{counts[where]}", text, proposes)


def _texts(node: ast.AST, where: str) -> Iterator[tuple[str, str]]:
    """Texts under a node that are no documentation, and where they stand."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}"
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        text = _joined(node)
        if text is not None:
            yield where, text
            return
    for child in _children(node):
        yield from _texts(child, where)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):  # a docstring
            yield child


def _joined(node: ast.AST) -> str | None:
    """The text of a literal, of one with values in it, or of a sum of such; None if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_joined(part) or "" if isinstance(part, ast.Constant) else UNKNOWN for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _joined(node.left), _joined(node.right)
        return None if left is None and right is None else f"{left or UNKNOWN}{right or UNKNOWN}"
    return None
