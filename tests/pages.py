"""What the repository prints for its users: pages, their snippets of code, and the names of ours that they say.

The one idea: text that a user may copy is read from the pages themselves, so that a test holds all of it and no list
has to be kept. Pages are Markdown files, YAML files and notebooks. Left out: the changelog, which may speak of what is
no more, and the template of ``docs/schedules.md``.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_parallel"
NOT_PAGES = ("CHANGELOG.md", "schedules_template.md")
MARKDOWN = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")] if path.name not in NOT_PAGES)
YAML = sorted((ROOT / "configs").rglob("*.yaml"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [*MARKDOWN, *YAML, *NOTEBOOKS, ROOT / "Makefile"]

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FROM = re.compile(rf"from ({PACKAGE}(?:\.\w+)*) import (?:\(([^)]*)\)|([^\n`]+))")
_DOTTED = re.compile(rf"(?<![\w./]){PACKAGE}(?:\.[A-Za-z_]\w*)+(?!/)")
_RUN = re.compile(r"python3? -m ([\w.]+)")


@dataclass(frozen=True)
class Snippet:
    """A block of code of a page: its file, its first line there, its language ("" where the page names none)."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(page: Path) -> list[Snippet]:
    """Blocks of code of a page of Markdown, in their order."""
    text = page.read_text()
    return [
        Snippet(page, text[: match.start()].count("\n") + 2, match[1], match[2].rstrip("\n"))
        for match in _FENCE.finditer(text)
    ]


def text_of(page: Path) -> str:
    """What a page prints; of a notebook its cells as they were written, without outputs."""
    if page.suffix != ".ipynb":
        return page.read_text()
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(page.read_text())["cells"])


def printed_imports(text: str) -> set[str]:
    """Dotted names of ours that a text imports or says.

    Example:
        >>> sorted(printed_imports("from lightning_parallel.demo import GPT as G, DigitsClassifier  # two"))
        ['lightning_parallel.demo', 'lightning_parallel.demo.DigitsClassifier', 'lightning_parallel.demo.GPT']
    """
    found = {name.rstrip(".") for name in _DOTTED.findall(text)}
    for home, several, one in _FROM.findall(text):
        names = ast.parse(f"from x import {several or one}".rstrip(", ")).body[0]
        assert isinstance(names, ast.ImportFrom)
        found |= {home, *(f"{home}.{alias.name}" for alias in names.names)}
    return found


def printed_modules(text: str) -> set[str]:
    """Modules of ours that a text runs with ``python -m``.

    Example:
        >>> printed_modules("`python -m lightning_parallel.demo gpt`, python -m pytest")
        {'lightning_parallel.demo'}
    """
    return {name for name in _RUN.findall(text) if name.partition(".")[0] == PACKAGE}


def commands(text: str, program: str) -> Iterator[str]:
    """Command lines of a text that begin with a program: lines of code blocks, and words in backticks.

    Example:
        >>> list(commands("Say `make test`:\\n```\\nmake demo   # first\\n```", "make"))
        ['make test', 'make demo']
    """
    quoted = rf"`({re.escape(program)} [^`]+)`"
    alone = rf"^({re.escape(program)} [^#\n`]+)"
    for match in re.finditer(f"{quoted}|{alone}", text, re.MULTILINE):
        yield " ".join((match[1] or match[2]).split())
