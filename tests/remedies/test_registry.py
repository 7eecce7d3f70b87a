"""Every message that proposes an option or a strategy has a test that does what it says, or a reason why not."""

import ast
from pathlib import Path

from tests.remedies.messages import messages
from tests.remedies.registry import EXECUTED, EXPLAINED, OPEN

ROOT = Path(__file__).parents[2]


def test_every_message_is_executed_explained_or_known_to_be_open():
    found = {message.key: message for message in messages()}
    listed = EXECUTED.keys() | EXPLAINED.keys() | OPEN
    new = [f"{key} proposes {found[key].proposes}: {found[key].text[:200]}" for key in sorted(found.keys() - listed)]
    assert not new, "Execute what these messages propose, and name the test in EXECUTED:\n" + "\n".join(new)
    assert sorted(listed - found.keys()) == [], "these messages are no longer there"


def test_a_message_stands_in_one_list():
    lists = [set(EXECUTED), set(EXPLAINED), set(OPEN)]
    assert sum(map(len, lists)) == len(set.union(*lists))


def test_tests_that_are_named_exist():
    for key, test in EXECUTED.items():
        path, _, name = test.partition("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert not name or name in functions, f"{key}: there is no {test}"


def test_messages_are_found_where_they_are_raised_warned_of_and_put_together(tmp_path, monkeypatch):
    from tests.remedies import messages as found

    source = '''"""Use num_microbatches=1, says a docstring."""
WORDS = "Use gather=\\"step\\"."
def f(n):
    """Use num_microbatches=2."""
    raise ValueError(f"got {n}. Use num_microbatches=1, or ZeROStrategy(stage=2).")
def g(n):
    raise ValueError(f"n={n} is none")
'''
    (tmp_path / "a.py").write_text(source)
    monkeypatch.setattr(found, "PACKAGE", tmp_path)
    assert [(m.key, m.proposes) for m in found.messages()] == [
        ("a", ('gather="step"',)),
        ("a.f", ("num_microbatches=1", "ZeROStrategy(stage=")),
    ]
