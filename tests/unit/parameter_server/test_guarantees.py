"""Every sentence of docs/parameter_server.md's table names a test that exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "U": "tests/unit/parameter_server",
    "R": "tests/ranks/test_server_processes.py",
    "C": "tests/ranks/test_server_cut_links.py",
    "T": "tests/trainer",
}
TEXT = (ROOT / "docs/parameter_server.md").read_text()
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", TEXT.partition("## What is guaranteed")[2].partition("\n## ")[0], re.M)[2:]
DEFINED = {
    file: set(re.findall(r"^def (test_\w+)", file.read_text(), re.M))
    for file in [*(ROOT / "tests/unit/parameter_server").glob("*.py"), *(ROOT / "tests").glob("*/test_*.py")]
}


@pytest.mark.parametrize(("sentence", "tests"), ROWS)
def test_a_guarantee_names_tests_that_exist(sentence, tests):
    names = re.findall(r"`([^`]*(?:/|::)[^`]*)`", tests)
    assert names or tests.startswith("the same"), sentence
    for name in names:
        path, _, function = name.partition("::")
        folder, _, rest = path.partition("/")
        file = ROOT / FOLDERS.get(folder, folder) / rest if path else None
        assert file is None or file.exists(), name
        known = DEFINED[file] if file in DEFINED else set().union(*DEFINED.values())
        assert not function or re.sub(r"\[.*", "", function) in known, name
