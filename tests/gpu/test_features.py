"""Every feature on as many GPUs as there are: the losses are those of one process on one of them.

All features share a launch, since starting ranks takes longer than training. One that ends the launch is reported, and
those behind it are launched anew. What does not fit the number of GPUs is skipped and says what it needs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.features import FEATURES, STEPS, Feature, run
from tests.missing_packages import installed

ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
if GPUS == 0:
    pytest.skip("there is no GPU", allow_module_level=True)


def why_not(feature: Feature) -> str:
    """Why a feature is left out here; "" if it runs."""
    if feature.package and not installed(feature.package):
        return f"{feature.package} is not installed"
    return feature.left_out(GPUS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What came of every feature that is asked for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name, feature in FEATURES.items() if name in asked and not why_not(feature)]
    path = tmp_path_factory.mktemp("features") / "results"
    results: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in results]:
        said = launch(path, left)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        results = {line.pop("name"): line for line in lines} | {n: r for n, r in results.items() if "ended" in r}
        if following := [name for name in left if name not in results]:
            results[following[0]] = {"error": said, "ended": True}
    return results


def launch(path: Path, names: Sequence[str]) -> str:
    """Run features on all GPUs; what the launch said last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, "-m", "tests.gpu.features", str(path), *names],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the launch did not end in 1500 s"
    return (done.stdout + done.stderr)[-6000:]


@cache
def one_process(module: type, trainer: tuple[tuple[str, Any], ...], steps: int) -> list[float]:
    """The losses of a plain Trainer on one GPU."""
    feature = Feature(module=module, trainer=dict(trainer))
    return run(feature, "auto", 1, steps, "cuda", None)[1]


@pytest.mark.timeout(1800)  # the first test waits for all
@pytest.mark.filterwarnings("ignore")  # of the Trainer in this process: what is compared is its losses
@pytest.mark.parametrize("name", FEATURES)
def test_losses_are_those_of_one_process(name: str, found: dict[str, dict[str, Any]]) -> None:
    feature = FEATURES[name]
    if reason := why_not(feature):
        pytest.skip(reason)
    assert "losses" in found[name], found[name]["error"]
    losses = found[name]["losses"]
    expected = one_process(feature.module, tuple(feature.trainer.items()), feature.steps)
    assert len(losses) == feature.batches >= STEPS
    # In 16 bits a step's rounding differs with the order of micro-batches and layers.
    tolerance = 2e-2 if "16" in str(feature.trainer.get("precision")) else 1e-4
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=0)
