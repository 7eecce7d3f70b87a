"""A test that needs a package which is not installed is skipped and says which.

What a test needs is seen when it asks for it: an import that fails, in the test's module, in the test or in one of its
ranks, of a package that this interpreter does not have. Left out: imports that fail in other processes than ranks.
"""

import importlib.util
import re
from collections.abc import Generator, Iterator
from typing import Any

import pytest

_SAID = re.compile(r"No module named '(\w+)|^(\w+) is not installed")
_IMPORTED_AS = {"pyzmq": "zmq"}


def missing_package(error: BaseException) -> str | None:
    """The package whose absence made an exception, or one that it came of; None if it has another reason.

    Example:
        >>> missing_package(ModuleNotFoundError("No module named 'not_there.part'", name="not_there.part"))
        'not_there'
        >>> missing_package(ModuleNotFoundError("No module named 'json.not_there'", name="json.not_there"))
    """
    for link in chain_of(error):
        if isinstance(link, ModuleNotFoundError):
            found = _SAID.search(str(link))
            name = (link.name or (found and (found[1] or found[2])) or "").partition(".")[0]
            if name and not installed(name):
                return name
    return None


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def installed(name: str) -> bool:
    """Whether a package can be imported, by the name that `import` or pip has for it."""
    return importlib.util.find_spec(_IMPORTED_AS.get(name, name)) is not None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """A module of tests that cannot be imported for want of a package is skipped."""
    report = yield
    said = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if said and not installed(said[1]):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: {said[1]} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """So is a test whose fixtures need one."""
    return (yield from _skipped_if_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """And a test that needs one itself."""
    return (yield from _skipped_if_missing())


def _skipped_if_missing() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except Exception as error:
        name = missing_package(error)
        if name is None:
            raise
        pytest.skip(f"{name} is not installed")
