"""The strategy strings are there once both packages are imported, in either order, and in whichever way.

A new interpreter a case, since only the first import of Lightning is like the first. Here both are imported.
"""

import pickle
import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_parallel
from lightning_parallel.strategies import registry

STRINGS = sorted(registry.STRINGS)
PIPELINES = [name for name in STRINGS if "pipeline" in name]
ASK = "from lightning.pytorch.strategies import StrategyRegistry as R; print(sorted(n for n in R if 'pipeline' in n))"


def printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_strings_are_registered_where_lightning_came_first():
    assert lightning_parallel
    assert [name for name in sorted(StrategyRegistry) if name in registry.STRINGS] == STRINGS
    assert {f"pipeline_{name}" for name in ("auto", "1f1b", "gpipe", "naive", "zb_v", "interleaved_1f1b")} <= set(
        STRINGS
    )


@pytest.mark.slow
def test_strings_are_registered_where_we_came_first_and_the_hook_leaves():
    hooks = "print(sum('_AfterImport' in repr(finder) for finder in sys.meta_path))"
    loaders = "print(type(lightning.pytorch.__loader__).__name__, type(lightning.pytorch.__spec__.loader).__name__)"
    code = f"import sys, lightning_parallel\n{hooks}\nimport lightning\n{hooks}\n{loaders}\n{ASK}"
    assert printed(code) == ["1", "0", "SourceFileLoader SourceFileLoader", str(PIPELINES)]


@pytest.mark.slow  # test_environments.py's script of torchrun's does the same
def test_strings_are_registered_where_a_strategy_is_what_imports_lightning():
    assert printed(f"from lightning_parallel.strategies import PipelineStrategy\n{ASK}") == [str(PIPELINES)]


@pytest.mark.parametrize("name", ["ssp", "zero_2", "pipeline_1f1b"])
def test_a_strategy_can_be_sent_to_spawned_ranks(name):
    registered = StrategyRegistry[name]
    options = {"num_microbatches": 2} if name.startswith("pipeline") else {}
    strategy = registered["strategy"](**registered["init_params"], **options, start_method="spawn")
    assert pickle.loads(pickle.dumps(strategy)).start_method == "spawn"
