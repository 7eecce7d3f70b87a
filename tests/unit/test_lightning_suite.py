"""The lists of Lightning's tests that differ can be read, and a difference that nobody has explained is found."""

import argparse
import subprocess
import sys

import pytest

from tests.lightning_suite import run
from tests.lightning_suite.differences import (
    EXPECTED,
    KINDS,
    Group,
    Result,
    by_headline,
    compare,
    read_list,
    sort_in,
    write_list,
)

PASSED = Result("passed")
LISTED = 'kind = "refused"\nreason = "no second call"\nsays = "LBFGS"\n'


def failed(message: str) -> Result:
    return Result("failed", f"in call:\ntests_pytorch/test_x.py:3: in test_a\n    fit()\nE   {message}\nE   more of it")


@pytest.mark.parametrize("name", [name for name in run.STRATEGIES if name != "base"])
def test_every_strategy_has_a_list_in_the_form_that_is_written(name, tmp_path):
    path = EXPECTED / f"{name}.toml"
    groups = read_list(path)
    assert {group.kind for group in groups} <= {*KINDS}
    assert all(test.startswith("tests_pytorch/") and "::" in test for group in groups for test in group.tests)
    assert [group.says for group in groups if not group.tests] == [], "groups without tests"
    write_list(tmp_path / "written", groups)
    assert (tmp_path / "written").read_text() == path.read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[difference]]\nkind = "known"\nreason = "x"\nsays = "x"\n', "'known' is none of refused, private, fault"),
        ('[[difference]]\nkind = "fault"\nreason = " "\nsays = "x"\ntests = ["a"]\n', "group of 1 tests has no reason"),
        (f'[[difference]]\n{LISTED}tests = ["a", "b", "a"]\n', "listed twice: a"),
        (f'[[difference]]\n{LISTED}tests = ["a"]\n[[difference]]\n{LISTED}tests = ["a"]\n', "listed twice: a"),
    ],
)
def test_a_list_that_says_too_little_or_too_much_is_refused(tmp_path, text, words):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_list(tmp_path / "x.toml")


def test_differences_are_explained_by_a_listed_test_and_its_words_together():
    base = {**dict.fromkeys("abcdef", PASSED), "g": failed("no file"), "h": Result("skipped")}
    base["i"] = Result("passed", met=False)
    ours = {
        "a": PASSED,
        "b": failed("ValueError: LBFGS is refused"),  # as listed
        "c": failed("KeyError: 7"),  # listed, other words
        "d": failed("LBFGS is refused"),  # not listed
        "e": PASSED,  # listed, and agrees
        "f": Result("skipped"),  # passes at base only
        "g": failed("no file"),  # fails at base too
        "i": failed("KeyError: 7"),  # has no Trainer in which ours would stand
    }
    found = compare(base, ours, [Group("refused", "no second call", "LBFGS", ["b", "c", "e", "g", "x"])])
    assert found.passed_at_base == 6
    assert found.expected[0][1] == ["b"]
    assert (found.count("refused"), found.count("fault")) == (1, 0)
    assert [*found.unexplained] == ["c", "d", "f"]
    assert found.agreeing == ["e"]
    assert found.strangers == ["g", "x"]
    assert not found.holds


def test_words_count_in_the_error_and_not_in_the_code_around_it():
    result = Result(
        "failed", "in call:\n    raise ValueError('LBFGS')\nE   KeyError: 1\n\nin teardown:\nE   left\nE   b"
    )
    assert result.message == "KeyError: 1\nleft\nb"
    assert result.headline == "left"
    assert not compare({"a": PASSED}, {"a": result}, [Group("refused", "x", "LBFGS", ["a"])]).holds


def test_a_list_is_brought_up_to_date_by_the_words_of_its_groups():
    groups = [Group("refused", "x", "LBFGS", ["b", "c", "e"]), Group("fault", "y", "KeyError", [])]
    ours = {"b": failed("LBFGS"), "c": failed("KeyError: 7"), "d": failed("LBFGS"), "e": PASSED, "f": failed("new")}
    base = dict.fromkeys("bcdef", PASSED)
    assert sort_in(groups, compare(base, ours, groups)) == ["f"]
    assert [group.tests for group in groups] == [["b", "d"], ["c"]]
    assert by_headline({test: ours[test] for test in "bdf"}) == {"LBFGS": ["b", "d"], "new": ["f"]}
    assert [*compare(base, ours, groups).unexplained] == ["f"]


def test_without_a_source_the_runner_says_how_to_get_one(capsys, tmp_path):
    assert run.main([]) == 2
    assert "No LIGHTNING_SOURCE." in capsys.readouterr().err
    assert run.main(["--source", str(tmp_path)]) == 2
    assert "has no tests/tests_pytorch" in (said := capsys.readouterr().err)
    assert "git clone --depth 1 --branch 2.6.5" in said


@pytest.fixture
def suite(tmp_path):
    tests = tmp_path / "source" / "tests" / "tests_pytorch" / "loops"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text(
        "import os, signal\n"
        "def test_before(): pass\n"
        "def test_dies(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_after(): pass\n"
    )
    for name in run.PATHS:
        path = tests.parent / name
        if path.suffix == ".py":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    options = argparse.Namespace(timeout=30, prefix="", workers=1, files=["test_a"])
    return run.Suite(tmp_path / "source", tmp_path / "out", options)


@pytest.mark.slow  # two interpreters that import Lightning: twelve seconds
def test_a_file_goes_on_behind_the_test_that_ends_its_process_and_does_not_run_twice(suite, tmp_path, capsys):
    results = suite.run("base", tmp_path / "results", None)
    outcomes = {test.rpartition("::")[2]: result.outcome for test, result in results.items()}
    assert outcomes == {"test_before": "passed", "test_dies": "failed", "test_wrong": "failed", "test_after": "passed"}
    dead = next(result for test, result in results.items() if test.endswith("test_dies"))
    assert dead.message == "The test's process ended in the middle of it (code -9)"
    before = (tmp_path / "results" / "loops-test_a.jsonl").read_text()
    assert suite.run("base", tmp_path / "results", None) == results
    assert (tmp_path / "results" / "loops-test_a.jsonl").read_text() == before


def test_files_share_processes_by_size(tmp_path):
    (tmp_path / "tests").mkdir()
    for name, size in zip("abcde", (90, 60, 30, 20, 10), strict=True):
        (tmp_path / "tests" / name).write_text("x" * size)
    assert run.grouped("abcde", tmp_path, size=80) == [["a"], ["b", "c"], ["d", "e"]]
    assert run.results_of(tmp_path, ["tests_pytorch/loops/test_all.py", "b"]) == tmp_path / "loops-test_all.jsonl"


def test_a_process_that_says_nothing_is_killed(suite, tmp_path):
    results = tmp_path / "loops-test_a.jsonl"
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    suite.timeout = -60  # no patience
    assert suite._wait(process, results, 0) == "The test hung: killed after 0 s"
    run.kill(process)
    assert process.returncode == -9
