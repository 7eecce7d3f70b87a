"""Tests that need a package which is not there are skipped by its name, and nothing else is."""

import pytest

from tests import missing_packages
from tests.missing_packages import missing_package


class Said:
    """Keeps why tests were skipped."""

    text = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.text += str(report.longrepr) if report.skipped else ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.text += str(report.longrepr) if report.skipped else ""


def outcomes(pytester: pytest.Pytester, source: str) -> tuple[tuple[int, int, int], str]:
    pytester.makepyfile(source)
    result = pytester.inline_run("-rs", "-p", "no:benchmark", plugins=[missing_packages, said := Said()])
    passed, skipped, failed = result.countoutcomes()
    return (passed, skipped, failed), said.text


def test_a_module_that_imports_it_is_skipped(pytester: pytest.Pytester) -> None:
    counts, said = outcomes(pytester, "import not_there.part\ndef test_one(): pass")
    assert counts == (0, 1, 0)
    assert "not_there is not installed" in said


def test_a_test_and_a_fixture_that_import_it_are_skipped(pytester: pytest.Pytester) -> None:
    counts, said = outcomes(
        pytester,
        """
        import pytest
        @pytest.fixture
        def thing(): import not_there
        def test_fixture(thing): pass
        def test_import():
            try:
                import not_there
            except ImportError as error:
                raise RuntimeError("rank 1 failed") from error
        def test_neither(): pass
        """,
    )
    assert counts == (1, 2, 0)
    assert said.count("not_there is not installed") == 2


def test_other_failures_stay(pytester: pytest.Pytester) -> None:
    counts, _ = outcomes(
        pytester,
        """
        def test_part_of_what_is_there(): import json.not_there
        def test_wrong(): assert False
        """,
    )
    assert counts == (0, 0, 2)


def test_words_of_the_package_itself() -> None:
    assert missing_package(ModuleNotFoundError("not_there is not installed: pip install not_there")) == "not_there"
    assert missing_package(ModuleNotFoundError("pytest is not installed")) is None
