"""Plausible faults of one place in a file, made from its syntax tree: every one that an operator can put in.

The one idea: a mutant is a piece of the file's text and what stands there instead, so that everything else (lines,
comments) stays as it is. Statements are numbered within their function, by which tests that reach them are found.

Left out, since no test is to see them: docstrings, annotations, texts of messages, warnings and logs, `__repr__`,
blocks of TYPE_CHECKING, decorators, defaults (a snapshot of signatures holds those), assertions, seconds of timeouts,
colours of pictures, and statements that run only with a GPU.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Body = Sequence[ast.stmt]
Found = tuple[ast.AST, str, str]  # the node, the operator's name, the text in its place

_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "all": "any", "any": "all", "sum": "max", "sorted": "list", "reversed": "list",
    "abs": "float", "median": "(lambda values: sum(values) / len(values))",
}  # fmt: skip
_ATTRIBUTES = {
    "SUM": "MAX", "MAX": "SUM", "MIN": "MAX", "sum": "mean", "mean": "sum", "zeros": "ones", "new_zeros": "new_ones",
    "zeros_like": "ones_like", "amax": "amin", "amin": "amax", "floor": "ceil", "ceil": "floor",
}  # fmt: skip
_DROPPED_METHODS = {"clone", "detach", "abs", "float"}
_WARNS = re.compile(r"warn|sleep|\blog(ger)?\b|info|debug|print|breakpoint|rank_zero_")
_SECONDS = re.compile(r"timeout|_s$|_ms$|seconds|interval|patience|retries|attempts|backlog|_BYTES$|size_limit", re.I)
_NO_RESULT = re.compile(
    r"timeout|_s$|strict|maxsize|stacklevel|non_blocking|daemon|^name$|msg|message|category|repr"
    r"|colors?$|alpha|linewidth|^lw$|fontsize|zorder|^dpi$|^[hv]a$|rotation|frameon"  # looks of pictures
)
_ONLY_GPU = re.compile(r"cuda|nccl|[Ss]tream|pin_memory|non_blocking|synchronize")
_ORDERED = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "range", "zip", "super", "cast", "partial"}


@dataclass(frozen=True)
class Mutant:
    """A fault at one place.

    Args:
        path: of the file, from the root of the repository.
        function: qualified name; "" outside of functions.
        statement: the number of the statement in its function.
        line: where the changed text begins, from 1.
        operator: what kind of fault.
        start, end: the text's place in the file, in bytes.
        before, after: what stands there, and what the fault puts in its place.
        twin: how many mutants of the same words come before it in the function.
    """

    path: str
    function: str
    statement: int
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str
    twin: int = 0

    @property
    def key(self) -> str:
        """What names it for as long as its statement stays the same, wherever that stands in the file."""
        twin = f" #{self.twin}" if self.twin else ""
        return f"{self.path}::{self.function}: {self.before} -> {self.after}{twin}"

    def apply(self, source: bytes) -> bytes:
        """The file's text with the fault."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, **asdict(self)}


@dataclass(frozen=True)
class Statement:
    """A statement, its function and its number there."""

    function: str
    number: int
    node: ast.stmt
    only_gpu: bool


def statements(tree: ast.Module) -> Iterator[Statement]:
    """Every statement but docstrings, by function in the order of the text.

    Example:
        >>> [(s.function, s.number) for s in statements(ast.parse("x = 1\\ndef f():\\n    if x:\\n        return 2"))]
        [('', 0), ('f', 0), ('f', 1)]
    """
    yield from _statements(tree.body, "", _Count(), False)


class _Count:
    def __init__(self) -> None:
        self.value = -1

    def next(self) -> int:
        self.value += 1
        return self.value


def _statements(body: Body, function: str, count: _Count, only_gpu: bool) -> Iterator[Statement]:
    for node in body:
        if _is_text(node) or _is_for_types(node):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}".lstrip(".")
            counted = count if isinstance(node, ast.ClassDef) else _Count()
            if node.name not in ("__repr__", "__str__", "extra_repr"):
                yield from _statements(node.body, inner, counted, only_gpu or bool(_ONLY_GPU.search(node.name)))
            continue
        gpu = only_gpu or any(_ONLY_GPU.search(ast.unparse(part)) for part in header(node))
        yield Statement(function, count.next(), node, gpu)
        for inner_body in bodies(node):
            yield from _statements(inner_body, function, count, gpu)


def bodies(node: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements within a statement."""
    found = [getattr(node, name) for name in ("body", "orelse", "finalbody") if getattr(node, name, None)]
    found[1:1] = [handler.body for handler in getattr(node, "handlers", [])]
    return found + [case.body for case in getattr(node, "cases", [])]


def header(node: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement that are not in a statement within it."""
    if isinstance(node, (ast.If, ast.While)):
        return [node.test]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.iter]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in node.items]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value is not None else []
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def mutants(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    tree, found, seen = ast.parse(source), list[Mutant](), dict[str, int]()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    returns = dict(_return_hints(tree.body, ""))
    for statement in statements(tree):
        if statement.only_gpu:
            continue
        for node, operator, after in of_statement(statement.node, statement.function, returns):
            start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            before = " ".join(source[start:end].decode().split())
            if before == after:
                continue
            mutant = Mutant(
                path,
                statement.function,
                statement.number,
                node.lineno,
                operator,
                start,
                end,
                before,
                after,  # type: ignore[attr-defined]
            )
            twin = seen[mutant.key] = seen.get(mutant.key, -1) + 1
            found.append(Mutant(**{**asdict(mutant), "twin": twin}))
    return found


def compiles(source: bytes) -> bool:
    """Whether a file's text is Python at all: a `continue` outside of a loop is not."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _return_hints(body: Body, prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                yield name, ast.unparse(node.returns)
            yield from _return_hints(node.body, name)
        else:
            for inner in bodies(node):
                yield from _return_hints(inner, prefix)


def of_statement(node: ast.stmt, function: str, returns: dict[str, str]) -> Iterator[Found]:
    """The faults that one statement may have, without those of statements within it."""
    if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
        return
    if isinstance(node, ast.Raise):
        if node.exc is not None and "NotImplementedError" not in ast.unparse(node.exc):
            yield node, "removed raise", "pass"
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if _WARNS.search(ast.unparse(node.value.func)):
            return
        if "super().__init__" not in ast.unparse(node.value.func):
            yield node, "removed call", "pass"
    elif isinstance(node, ast.Break):
        yield node, "break or continue", "continue"
    elif isinstance(node, ast.Continue):
        yield node, "break or continue", "break"
    elif isinstance(node, ast.AugAssign):
        other = _ARITHMETIC.get(type(node.op))
        if other is not None:
            yield node, "arithmetic", ast.unparse(ast.AugAssign(node.target, other(), node.value))
    elif isinstance(node, ast.Assign):
        to_attribute = all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        if to_attribute and function and not function.endswith(("__init__", "__new__", "__post_init__")):
            yield node, "removed assignment", "pass"
        if _SECONDS.search(" ".join(ast.unparse(target) for target in node.targets)):
            return
    elif isinstance(node, ast.AnnAssign) and (is_in_a_class(function) or _SECONDS.search(ast.unparse(node.target))):
        return
    elif isinstance(node, ast.Return) and node.value is not None:
        yield from _returns(node, returns.get(function, ""))
    if not function and isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_listing(node):
        return
    for expression in header(node):
        if isinstance(node, (ast.If, ast.While)):
            yield from _negated(node.test)
        yield from _in_expression(expression)


def is_in_a_class(function: str) -> bool:
    """Whether a statement lies in the body of a class itself: the default of a field, as that of an argument."""
    return function.rpartition(".")[2].lstrip("_")[:1].isupper()


def _is_listing(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id.startswith("__") for target in targets)


def _returns(node: ast.Return, hint: str) -> Iterator[Found]:
    value = node.value
    if isinstance(value, (ast.Constant, ast.Compare, ast.BoolOp, ast.JoinedStr)) or value is None:
        return
    if hint == "bool" and not isinstance(value, ast.UnaryOp):
        yield node, "returned value", f"return not ({ast.unparse(value)})"
    elif "None" in hint:
        yield node, "returned value", "return None"
    elif hint in ("int", "float"):
        yield node, "returned value", f"return ({ast.unparse(value)}) + 1"
    elif hint.startswith(("list", "Sequence")):
        yield node, "returned value", "return []"
    elif hint.startswith(("dict", "Mapping")):
        yield node, "returned value", "return {}"


def _negated(test: ast.expr) -> Iterator[Found]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return  # "removed not" does it
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot, ast.Eq)):
        return  # and so does the comparison
    yield test, "negated condition", f"not ({ast.unparse(test)})"


def _in_expression(node: ast.expr, name: str = "") -> Iterator[Found]:
    """Faults of an expression; `name` is the keyword whose value it is."""
    if isinstance(node, (ast.JoinedStr, ast.Lambda)) and not isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call) and _WARNS.search(ast.unparse(node.func)):
        return
    yield from _of_node(node, name)
    if isinstance(node, ast.Lambda):
        yield from _in_expression(node.body)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            yield from _in_expression(child.value, child.arg or "")
        elif isinstance(child, ast.comprehension):
            yield from _in_expression(child.iter)
            for test in child.ifs:
                yield from _negated(test)
                yield from _in_expression(test)
        elif isinstance(child, ast.expr):
            if isinstance(node, ast.Call) and child is node.func and isinstance(child, ast.Name):
                continue
            yield from _in_expression(child, name)


def _of_node(node: ast.expr, name: str) -> Iterator[Found]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _COMPARISONS[type(node.ops[0])]
        changed = ast.Compare(node.left, [other()], node.comparators)
        yield node, "comparison", f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        changed_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, "and or or", f"({ast.unparse(ast.BoolOp(changed_op, node.values))})"
        for i in range(len(node.values)):
            rest = [value for j, value in enumerate(node.values) if j != i]
            left = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            yield node, "dropped condition", f"({ast.unparse(left)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, "removed not", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not _is_number(node.operand):
        yield node, "removed minus", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _has_text(node):
        yield node, "arithmetic", f"({ast.unparse(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.IfExp):
        yield node, "negated condition", f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node, name)
    elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
        yield node, "another name", f"{ast.unparse(node.value)}.{_ATTRIBUTES[node.attr]}"
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _has_text(node: ast.BinOp) -> bool:
    return any(isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and type(n.value) in (str, bytes))
               for n in ast.walk(node))  # fmt: skip


def _is_unseen(name: str) -> bool:
    """Whether the keyword of an argument is one that no test is to see."""
    return bool(_SECONDS.search(name) or _NO_RESULT.search(name))


def _of_constant(node: ast.Constant, name: str) -> Iterator[Found]:
    if _is_unseen(name):
        return
    if isinstance(node.value, bool):
        yield node, "constant", str(not node.value)
    elif isinstance(node.value, (int, float)) and node.value == node.value and abs(node.value) != float("inf"):
        yield node, "constant", repr(node.value + 1)


def _of_call(node: ast.Call) -> Iterator[Found]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    if called in _NAMES and node.args:
        arguments = ", ".join(ast.unparse(argument) for argument in [*node.args, *_keywords(node, called)])
        yield node, "another name", f"{_NAMES[called]}({arguments})"
    if isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED_METHODS and not node.args:
        yield node, "dropped method", ast.unparse(node.func.value)
    for keyword in node.keywords:
        if keyword.arg is not None and not _is_unseen(keyword.arg) and called not in ("dataclass", "field"):
            rest = [other for other in node.keywords if other is not keyword]
            yield node, "dropped argument", ast.unparse(ast.Call(node.func, node.args, rest))
    plain = not any(isinstance(argument, ast.Starred) for argument in node.args)
    if len(node.args) >= 2 and plain and called not in _ORDERED | set(_NAMES):
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield node, "swapped arguments", ast.unparse(ast.Call(node.func, swapped, node.keywords))


def _keywords(node: ast.Call, called: str) -> list[Any]:
    return [] if called in ("sorted", "sum") else node.keywords


def files(root: Path, folders: Sequence[str]) -> list[str]:
    """The paths of the package's modules in folders, sorted."""
    package = root / "lightning_parallel"
    return sorted(str(p.relative_to(root)) for folder in folders for p in (package / folder).rglob("*.py"))
