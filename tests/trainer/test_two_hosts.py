"""A pipeline over two hosts: two network namespaces joined by a cable, one torchrun in each."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]
HOSTS = {"one": "10.213.7.1", "two": "10.213.7.2"}
SCRIPT = """
import sys, torch
from lightning_parallel.strategies import PipelineStrategy
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.pipelines import make_trainer

class Fails(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if "fail" in sys.argv and batch_idx == 1 and self.trainer.global_rank == 3:
            raise ValueError("the fourth rank has had enough")

torch.set_num_threads(1)
torch.manual_seed(0)
trainer = make_trainer(PipelineStrategy(num_microbatches=4), 2, num_nodes=2)
trainer.fit(Fails(), row_loader(), row_loader())
weights = trainer.strategy.pipeline.own
print(f"rank {trainer.global_rank} node {trainer.node_rank} stage {trainer.strategy.pipeline.row} of 4,"
      f" loss {float(trainer.callback_metrics['loss']):.6f}")
"""


@dataclass
class Host:
    """A network namespace."""

    name: str
    namespace: str

    def start(self, script: Path, number: int, *arguments: str) -> subprocess.Popen:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        meet = ["--node-rank", str(number), "--master-addr", HOSTS["one"], "--master-port", "29511"]
        environment = {
            **os.environ, "GLOO_SOCKET_IFNAME": f"lp-{self.name}", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *torchrun, *meet, str(script), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two namespaces with a cable between them; skipped where this process may not make any."""
    made = [Host(name, f"lp-{os.getpid()}-{name}") for name in HOSTS]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    try:
        for host in made:
            ip("netns", "add", host.namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    try:
        first, second = made
        ip(
            "-n",
            first.namespace,
            "link",
            "add",
            "lp-one",
            "type",
            "veth",
            "peer",
            "name",
            "lp-two",
            "netns",
            second.namespace,
        )
        for host in made:
            ip("-n", host.namespace, "addr", "add", f"{HOSTS[host.name]}/24", "dev", f"lp-{host.name}")
            ip("-n", host.namespace, "link", "set", f"lp-{host.name}", "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def run(hosts: list[Host], folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit status and output of both hosts' torchrun."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    started = [host.start(script, number, *arguments) for number, host in enumerate(hosts)]
    outputs = [process.communicate(timeout=100)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_four_stages_on_two_hosts(hosts, tmp_path):
    (first, said), (second, said_too) = run(hosts, tmp_path)
    assert (first, second) == (0, 0), said + said_too
    lines = re.findall(r"rank (\d) node (\d) stage (\d) of 4, loss (\S+)", said + said_too)
    assert sorted(line[:3] for line in lines) == [("0", "0", "3"), ("1", "0", "2"), ("2", "1", "1"), ("3", "1", "0")]
    assert len({line[3] for line in lines}) == 1


def test_a_failure_on_one_host_is_shown_on_both(hosts, tmp_path):
    results = run(hosts, tmp_path, "fail")
    for status, said in results:
        assert status != 0
        assert "stage 0 (rank 3) failed in on_train_batch_start (epoch 0, batch 1): ValueError" in said
        assert "the fourth rank has had enough" in said
