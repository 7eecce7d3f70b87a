"""Weights after three steps to the bit, and each rank's order of collectives, as they were written down.

A change that is meant is written down anew: ``python -m tests.nets.record``, and the difference is read in git.
"""

from collections.abc import Sequence

import pytest

from tests.nets import snapshots
from tests.nets.layouts import LAYOUTS
from tests.nets.record import is_there
from tests.nets.runs import Run, launched, one_process


def together() -> list[list[str]]:
    """The layouts of `make test`, those of equally many ranks in one launch."""
    cheap = [name for name, layout in LAYOUTS.items() if not layout.slow]
    return [[name for name in cheap if LAYOUTS[name].ranks == count] for count in {LAYOUTS[n].ranks for n in cheap}]


def hold(names: Sequence[str]) -> None:
    """Run layouts, and fail with all that is not as it was."""
    missing = [f"{name} needs {LAYOUTS[name].engine}" for name in names if not is_there(LAYOUTS[name].engine)]
    names = [name for name in names if is_there(LAYOUTS[name].engine)]
    runs = launched(names) if names else {}
    wrong, told = [], []
    for name in names:
        wrong += snapshots.differences_of_calls(name, runs[name])
        differences, how = snapshots.differences_of_bits(name, runs[name])
        wrong, told = wrong + differences, [*told, *([how] if how else [])]
    assert not wrong, "\n".join([f"{len(wrong)} differences", *wrong[:40]])
    # Said where everybody reads it; the order of collectives was compared.
    told = [f"other bits in one process than where the snapshot was written: {'; '.join(told)}"] if told else []
    if told + missing:
        pytest.skip("; ".join(told + missing))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("names", together(), ids=lambda names: f"{LAYOUTS[names[0]].ranks} ranks")
def test_layouts_are_as_they_were(names):
    hold(names)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.slow])
def test_layout_is_as_it_was(name):
    hold([name])


def test_every_snapshot_has_its_layout():
    written = {path.name for path in snapshots.FOLDER.glob("*.json")}
    assert written == {snapshots.path_of(name).name for name in LAYOUTS}


def test_what_is_packed_is_unpacked():
    calls = [
        {"batch 0": ["a", "a", "b"], "batch 1": ["a", "a", "b"], "states": ["c"]},
        {"batch 0": ["a", "a", "b"], "batch 1": ["a", "a", "b"], "states": ["c"]},
        {"batch 0": ["3 B"]},
    ]
    packed = snapshots.packed(calls)
    assert packed["rank 0"] == {"batch 0": ["2 x a", "b"], "batch 1": "as batch 0", "states": ["c"]}
    assert packed["rank 1"] == "as rank 0"
    assert snapshots.unpacked(packed) == calls


def test_what_is_not_as_it_was_is_named():
    name = "pipeline 1f1b, rows"
    recorded = snapshots.unpacked(snapshots.read(name)["calls"])
    runs = [Run(calls={part: list(lines) for part, lines in parts.items()}) for parts in recorded]
    assert snapshots.differences_of_calls(name, runs) == []
    lines = runs[1].calls["batch 1"]
    lines[2:4] = lines[3:1:-1]
    assert lines[2] != lines[3]
    first = f"recorded {lines[3]!r}, now {lines[2]!r}"
    assert snapshots.differences_of_calls(name, runs) == [f"{name}: rank 1, batch 1, call 2: {first}"]


def test_on_a_machine_of_other_bits_weights_are_held_to_one_process():
    name, elsewhere = "pipeline 1f1b, rows", {"one process": "other bits"}
    run = Run(weights={key: value.clone() for key, value in one_process(name).weights.items()})
    told = f"{name}: beside one process within {{'rtol': 2e-05, 'atol': 2e-06}}"
    assert snapshots.differences_of_bits(name, [run], elsewhere) == ([], told)
    run.weights["net.3.bias"] += 1e-4
    [difference], _ = snapshots.differences_of_bits(name, [run], elsewhere)
    assert difference.startswith(f"{name}: weights net.3.bias beside one process: Tensor-likes are not close")
