"""Ranks that somebody else starts: torchrun itself, and SLURM's variables."""

import os
import re
import subprocess
import sys

import pytest

from lightning_parallel.strategies import PipelineStrategy
from tests.harness import free_port, run_ranks
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import LOSS, SECRET_OF_TESTS, WEIGHTS, Case, assert_same, fit, one_process


def join_as_slurm(rank: int, world_size: int, port: int) -> None:
    """Make this process a task of a SLURM step on one node."""
    os.environ.update(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NTASKS=str(world_size), SLURM_NTASKS_PER_NODE=str(world_size),
        SLURM_NNODES="1", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0", SLURM_NODELIST="localhost",
        MASTER_PORT=str(port), **SECRET_OF_TESTS,
    )  # fmt: skip


def test_a_pipeline_runs_under_slurms_variables():
    case = Case(Classifier, row_loader)

    def run(rank: int, port: int) -> object:
        join_as_slurm(rank, 2, port)
        return fit(case, PipelineStrategy(num_microbatches=4), 2)

    records = run_ranks(run, 2, free_port(), group=False)
    assert_same(records, one_process(case), LOSS, WEIGHTS)


def test_slurm_tasks_that_do_not_match_devices_are_named():
    def run(rank: int, port: int) -> object:
        join_as_slurm(rank, 2, port)
        return fit(Case(Classifier, row_loader), PipelineStrategy(num_microbatches=4), 4)

    with pytest.raises(ValueError, match=r"set the number of devices.*SLURM|--ntasks-per-node"):
        run_ranks(run, 2, free_port(), group=False)


SCRIPT = """
from lightning_parallel.strategies import PipelineStrategy  # imports Lightning, and registers the strings
import torch
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer

torch.set_num_threads(1)
torch.manual_seed(0)
trainer = make_trainer("pipeline_1f1b", 2)
assert isinstance(trainer.strategy, PipelineStrategy)
trainer.fit(Classifier(), row_loader(), row_loader())
print(f"rank {trainer.global_rank} holds stage {trainer.strategy.pipeline.row} after {trainer.global_step} steps")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchrun_starts_a_pipeline(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=55, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank \d holds stage \d after \d steps", done.stdout)
    assert sorted(lines) == ["rank 0 holds stage 1 after 3 steps", "rank 1 holds stage 0 after 3 steps"]
