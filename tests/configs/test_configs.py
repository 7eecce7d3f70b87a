"""Every YAML in configs/ runs as it stands, through the command, with the processes that it asks for."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

QUICK = {"digits_1f1b"}  # of this `make test` has enough
CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


def test_there_are_configs():
    assert {path.stem for path in CONFIGS} >= {"digits_naive", "digits_gpipe", "digits_1f1b", "gpt_1f1b"}


@pytest.mark.timeout(110)  # under a minute where nothing else runs
@pytest.mark.parametrize(
    "config",
    [pytest.param(path, marks=[] if path.stem in QUICK else [pytest.mark.slow]) for path in CONFIGS],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_config_runs_as_it_stands(tmp_path, config):
    if config.stem.endswith("_deepspeed") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    command = [sys.executable, "-m", "lightning_parallel", "fit", "--config", str(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    (saved,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    assert (
        yaml.safe_load(saved.read_text())["trainer"]["devices"]
        == yaml.safe_load(config.read_text())["trainer"]["devices"]
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_config_says_its_own_command(config):
    relative = config.relative_to(CONFIGS[0].parents[2])
    assert config.read_text().startswith(f"# lightning-parallel fit --config {relative}\n")
