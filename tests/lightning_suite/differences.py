"""Which tests of Lightning differ under a strategy, and which of them are expected to, from `expected/STRATEGY.toml`.

A list is made of groups. Each has a kind, a reason, words that the failure must say, and the tests::

    [[difference]]
    kind = "refused"
    reason = "LBFGS needs the loss of the whole model again and again"
    says = "LBFGS"
    tests = ["tests_pytorch/...::test_...", ...]

A test that is listed and fails with other words is as unexplained as one that is not listed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings it there
    import tomli as tomllib

EXPECTED = Path(__file__).parent / "expected"
KINDS = {
    "refused": "the strategy refuses by design what the test does, in words",
    "private": "the test asserts or patches something private of Lightning's own strategy",
    "fault": "a fault of ours, not mended yet",
}


@dataclass(frozen=True)
class Result:
    """What became of a test.

    Attributes:
        outcome: passed, failed or skipped.
        text: pytest's short traceback.
        seconds: what it took, with its fixtures.
        met: whether it made a Trainer that takes Lightning's SingleDeviceStrategy, or ours in its place.
    """

    outcome: str
    text: str = ""
    seconds: float = 0.0
    met: bool = True

    @property
    def applies(self) -> bool:
        """As a result of Lightning as it is: whether a strategy in its place has to pass the test too."""
        return self.met and self.outcome == "passed"

    @property
    def message(self) -> str:
        """The lines of the text that pytest marks as the error's own, without the mark.

        >>> Result("failed", "test_x.py:3: in test_x\\n    f()\\nE   ValueError: no\\nE   such thing").message
        'ValueError: no\\nsuch thing'
        """
        marked = [line[1:].strip() for line in self.text.splitlines() if line.startswith("E ")]
        return "\n".join(marked) or self.text.strip()

    @property
    def headline(self) -> str:
        """The first line of the last error in the text: what pytest shows in its summary."""
        lines = self.text.splitlines()
        firsts = [b for a, b in zip(["", *lines], lines, strict=False) if b[:2] == "E " and a[:2] != "E "]
        return firsts[-1][1:].strip() if firsts else self.message[:200]


@dataclass
class Group:
    """Tests that differ for one reason."""

    kind: str
    reason: str
    says: str
    tests: list[str] = field(default_factory=list)


@dataclass
class Comparison:
    """A strategy's results beside the base's, and beside the list of what is expected.

    Attributes:
        passed_at_base: number of tests that use and pass with SingleDeviceStrategy, and have been run with ours.
        expected: group and tests that differ as listed.
        unexplained: tests that differ and are not listed, or say other words than their group.
        agreeing: tests that are listed and pass.
        strangers: tests that are listed and do not pass at base on this machine, or do not exist.
    """

    passed_at_base: int
    expected: list[tuple[Group, list[str]]]
    unexplained: dict[str, Result]
    agreeing: list[str]
    strangers: list[str]

    def count(self, kind: str) -> int:
        """Number of tests that differ as expected, of one kind."""
        return sum(len(tests) for group, tests in self.expected if group.kind == kind)

    @property
    def holds(self) -> bool:
        """Whether every difference is explained and every listed test differs."""
        return not self.unexplained and not self.agreeing


def read_list(path: Path) -> list[Group]:
    """The groups of an expected list.

    Raises:
        ValueError: a group has an unknown kind or key, no reason or no words, or a test stands twice.
    """
    groups = [Group(**entry) for entry in tomllib.loads(path.read_text()).get("difference", [])]
    seen: set[str] = set()
    for group in groups:
        if group.kind not in KINDS:
            raise ValueError(f"{path.name}: kind {group.kind!r} is none of {', '.join(KINDS)}")
        if not group.reason.strip() or not group.says.strip():
            raise ValueError(f"{path.name}: a group of {len(group.tests)} tests has no reason, or no words to be found")
        if twice := seen.intersection(group.tests) or {x for x in group.tests if group.tests.count(x) > 1}:
            raise ValueError(f"{path.name}: listed twice: {', '.join(sorted(twice))}")
        seen.update(group.tests)
    return groups


def write_list(path: Path, groups: Iterable[Group]) -> None:
    """Write groups so that `read_list` gives them back; those without tests stay, as an offer to `sort_in`."""
    order = list(KINDS)
    blocks = [
        f"# Expected differences, by kind: {', '.join(KINDS)} (see differences.py). `make test-lightning` reads it.\n"
    ]
    for group in sorted(groups, key=lambda group: order.index(group.kind)):
        tests = "".join(f"    {json.dumps(test)},\n" for test in sorted(group.tests))
        blocks.append(
            f"[[difference]]\nkind = {json.dumps(group.kind)}\nreason = {json.dumps(group.reason)}\n"
            f"says = {json.dumps(group.says)}\ntests = [\n{tests}]\n"
        )
    path.write_text("\n".join(blocks))


def compare(base: Mapping[str, Result], ours: Mapping[str, Result], groups: Iterable[Group]) -> Comparison:
    """Set a strategy's results beside the base's: every test that passes there and has been run here.

    Args:
        base: results with Lightning as it is.
        ours: results with the strategy; a test that passes at base and is missing here was not asked for.
        groups: what is expected.
    """
    both = {test for test, result in base.items() if result.applies and test in ours}
    differing = {test: ours[test] for test in sorted(both) if ours[test].outcome != "passed"}
    expected, agreeing, strangers = [], [], []
    unexplained = dict(differing)
    for group in groups:
        met = [test for test in group.tests if test in differing and group.says in differing[test].message]
        expected.append((group, met))
        for test in met:
            unexplained.pop(test)
        agreeing += [test for test in group.tests if test in both and test not in differing]
        strangers += [test for test in group.tests if test not in base or not base[test].applies]
    return Comparison(len(both), expected, unexplained, agreeing, strangers)


def sort_in(groups: list[Group], comparison: Comparison) -> list[str]:
    """Bring a list up to date: what agrees leaves it, what is unexplained goes to the first group whose words it says.

    Returns:
        Tests that no group's words fit.
    """
    gone = {*comparison.agreeing, *comparison.unexplained}
    for group in groups:
        group.tests = [test for test in group.tests if test not in gone]
    left = []
    for test, result in comparison.unexplained.items():
        fitting = next((group for group in groups if group.says in result.message), None)
        if fitting is None:
            left.append(test)
        else:
            fitting.tests.append(test)
    return left


def by_headline(results: Mapping[str, Result]) -> dict[str, list[str]]:
    """Tests by the error that ends them, most frequent first."""
    found = defaultdict(list)
    for test, result in results.items():
        found[result.headline].append(test)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
