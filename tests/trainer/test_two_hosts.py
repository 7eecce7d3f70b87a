"""Runs over two hosts: two network namespaces joined by a cable, one torchrun in each."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.namespaces import HOSTS, Host, two_hosts
from tests.trainer import test_parameter_server_sandblaster as sandblaster
from tests.trainer.hybrids import gpt, token_loader
from tests.trainer.pipelines import WEIGHTS, make_trainer
from tests.trainer.servers import fit
from tests.trainer.test_parameter_server_rows import AT, reference, share, side_by_side

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]
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


MESH = """
import torch
from lightning.pytorch import Callback
from lightning_parallel.strategies import HybridStrategy
from tests.trainer import test_parameter_server_sandblaster as sandblaster
from tests.trainer.hybrids import gpt, token_loader
from tests.trainer.pipelines import make_trainer

torch.set_num_threads(1)
torch.manual_seed(0)
strategy = HybridStrategy(data_parallel_size=2, tensor_parallel_size=2, zero_stage=2)
trainer = make_trainer(strategy, 2, num_nodes=2, max_steps=2, use_distributed_sampler=False)
class Notes(Callback):
    def on_train_start(self, trainer, module):
        self.place = [trainer.strategy.axis_rank(axis) for axis in ("data", "tensor")]

trainer.callbacks.append(notes := Notes())
trainer.fit(gpt(num_heads=4), token_loader(), token_loader())
place = notes.place
print(f"rank {trainer.global_rank} node {trainer.node_rank} place {place}, loss"
      f" {float(trainer.callback_metrics['train_loss']):.6f}")
"""
SERVERS = """
import os, signal, sys, torch
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import Classifier, row_loader
from tests.trainer.servers import RAGGED
from tests.trainer.pipelines import make_trainer

class Dies(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if "die" in sys.argv and batch_idx == 1 and self.trainer.global_rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if "cut" in sys.argv and batch_idx == 1 and self.current_epoch == 0:
            open(f"reached{self.trainer.global_rank}", "w").close()  # returns once the test reads
            open(f"cut{self.trainer.global_rank}").close()  # returns once the cable is out

torch.set_num_threads(1)
torch.manual_seed(1)
module = Dies()
options = {"num_servers": 2, "lease": 20.0}
if "islands" in sys.argv:
    options |= {"island_size": 2}
if "together" in sys.argv:
    options |= {"server_nodes": 1}
if "replicas" in sys.argv:
    options |= {"num_servers": 4, "replication": 2, "lease": 6.0}
strategy = ParameterServerStrategy(**options)
trainer = make_trainer(strategy, 2, num_nodes=2, max_epochs=2, use_distributed_sampler=False)
trainer.fit(module, row_loader(RAGGED), row_loader((5, 8)))
loss = float(trainer.callback_metrics["val_loss"])
print(f"rank {trainer.global_rank} node {trainer.node_rank}, val_loss {loss:.6f}")
"""

AGAIN = """
import os, sys, torch
from pathlib import Path
from torch.utils.data import DataLoader
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.modules import row_loader
from tests.trainer.pipelines import make_trainer
from tests.trainer.test_parameter_server_rows import BATCH, Marks, Numbered

class Awaits(Marks):
    def setup(self, stage):
        line = self.trainer.strategy._line
        if line is not None and line.is_new:
            open("there", "w").close()

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        if self.global_rank == 0 and self.current_epoch == 0:
            open("there").close()  # returns once the new worker is there

torch.set_num_threads(1)
torch.manual_seed(1)
module = Awaits(Path.cwd())
def trainer_of(**options):
    strategy = ParameterServerStrategy(num_servers=2, lease=40.0, restarts=1)
    return make_trainer(strategy, 1, num_nodes=2, num_sanity_val_steps=0, **options)

(before,) = trainer_of().validate(module, row_loader((5,)), verbose=False)
trainer = trainer_of(max_epochs=2)
trainer.fit(module, DataLoader(Numbered(), BATCH, shuffle=True), row_loader((5,)))
if trainer.is_global_zero:
    torch.save(module.state_dict(), "weights.pt")
print(f"rank {trainer.global_rank} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} before {before['val_loss']:.6f}")
"""

TOGETHER = """
import torch
from lightning_parallel.strategies import ParameterServerStrategy
from tests.trainer.test_parameter_server_sandblaster import Wolfe, run

torch.set_num_threads(1)
strategy = ParameterServerStrategy("sandblaster", num_servers=2, lease=20.0)
module, trainer = run(strategy, 2, Wolfe, num_nodes=2, gradient_clip_val=0.2)
torch.save(module.state_dict(), f"weights{trainer.global_rank}.pt")
"""


def start(
    host: Host, script: Path, number: int, *arguments: str, options: Sequence[str] = ("--nproc-per-node", "2")
) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *options]
    meet = ["--node-rank", str(number), "--master-addr", HOSTS["one"], "--master-port", "29511"]
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, *torchrun, *meet, str(script), *arguments],
        env=environment, cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


def run(hosts: list[Host], folder: Path, *arguments: str, text: str = SCRIPT) -> list[tuple[int, str]]:
    """Exit status and output of both hosts' torchrun."""
    script = folder / "train.py"
    script.write_text(text)
    started = [start(host, script, number, *arguments) for number, host in enumerate(hosts)]
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
        assert "stage 0 (rank 3) failed in on_train_batch_start (epoch 0, batch 1)\n" in said
        assert "ValueError: the fourth rank has had enough" in said


def test_of_a_mesh_the_last_axis_is_inside_a_host(hosts, tmp_path):
    """Both copies see the same rows here, so they log the loss of one process."""
    (first, said), (second, said_too) = run(hosts, tmp_path, text=MESH)
    assert (first, second) == (0, 0), said + said_too
    lines = re.findall(r"rank (\d) node (\d) place \[(\d), (\d)\], loss (\S+)", said + said_too)
    assert sorted(line[:4] for line in lines) == [
        ("0", "0", "0", "0"), ("1", "0", "0", "1"), ("2", "1", "1", "0"), ("3", "1", "1", "1"),
    ]  # fmt: skip
    reference = make_trainer("auto", 1, max_steps=2)
    torch.manual_seed(0)
    reference.fit(gpt(num_heads=4), token_loader(), token_loader())
    expected = float(reference.callback_metrics["train_loss"])
    assert all(float(line[4]) == pytest.approx(expected, abs=2e-6) for line in lines)


@pytest.mark.parametrize("arguments", [(), ("islands",)], ids=str)
def test_workers_of_two_hosts_are_one_process_on_the_same_rows(hosts, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("LIGHTNING_PARALLEL_SECRET", "0123456789abcdef")
    (first, said), (second, said_too) = run(hosts, tmp_path, *arguments, text=SERVERS)
    assert (first, second) == (0, 0), said + said_too
    lines = re.findall(r"rank (\d) node (\d), val_loss (\S+)", said + said_too)
    expected = float(fit("auto")[0].callback_metrics["val_loss"])
    assert sorted(line[:2] for line in lines) == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    assert all(float(line[2]) == pytest.approx(expected, abs=2e-6) for line in lines)


def test_workers_go_on_without_one_that_died_on_another_host(hosts, tmp_path, monkeypatch):
    """Rank 3 is killed; torchrun there ends rank 2 as well. The first host's go on, and its torchrun waits for long."""
    monkeypatch.setenv("LIGHTNING_PARALLEL_SECRET", "0123456789abcdef")
    script = tmp_path / "train.py"
    script.write_text(SERVERS)
    started = [start(host, script, number, "die") for number, host in enumerate(hosts)]
    said = first_hosts_results(hosts, started)
    assert "Worker 3 is gone" in said and "Worker 2 is gone (it was told to end, by SIGTERM)" in said


def first_hosts_results(hosts: list[Host], started: list[subprocess.Popen]) -> str:
    """What the first host's torchrun says until both of its ranks have come to the end of the run."""
    said = ""
    for line in started[0].stdout or ():
        said += line
        if said.count("val_loss") == 2:
            break
    for host in hosts:
        host.end()
    for process in started:
        process.communicate()
    lines = re.findall(r"rank (\d) node (\d), val_loss (\S+)", said)
    assert sorted(line[:2] for line in lines) == [("0", "0"), ("1", "0")], said
    return said


@contextmanager
def all_in_a_step(hosts: list[Host], folder: Path, *arguments: str) -> Iterator[list[subprocess.Popen]]:
    """Runs whose four workers wait within a step until this is left."""
    script = folder / "train.py"
    script.write_text(SERVERS)
    names = [f"{what}{rank}" for what in ("reached", "cut") for rank in range(4)]
    for name in names:
        os.mkfifo(folder / name)
    started = [start(host, script, number, "cut", *arguments) for number, host in enumerate(hosts)]
    for name in names[:4]:
        (folder / name).read_bytes()
    yield started
    for name in names[4:]:
        (folder / name).open("w").close()


def servers_of(host: Host) -> list[int]:
    """Processes that are children of none on this host, and lead a session of their own."""
    pids = {*host.processes(), 0}
    stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids - {0}}
    return [pid for pid, stat in stats.items() if int(stat[1]) not in pids and int(stat[3]) == pid]


@pytest.mark.parametrize("where", ["together", "replicas"])
def test_workers_go_on_without_a_host_whose_cable_is_out(hosts, tmp_path, monkeypatch, where):
    """It is silent for longer than the hub allows; its workers are left behind, and end, and so do its servers."""
    monkeypatch.setenv("LIGHTNING_PARALLEL_SECRET", "0123456789abcdef")
    try:
        with all_in_a_step(hosts, tmp_path, where) as started:
            assert len(servers_of(hosts[1])) == (2 if where == "replicas" else 0)
            hosts[1].cable("down")
        second = started[1].communicate()[0]
        said = first_hosts_results(hosts, started[:1])
    finally:
        hosts[1].cable("up")
    assert "Worker 2 is gone" in said and "Worker 3 is gone" in said
    assert "lost its line to the launcher of the run" in second  # its workers end, too


def test_no_weights_are_lost_with_the_servers_of_a_host(hosts, tmp_path, monkeypatch):
    """Each piece of them is on both hosts."""
    monkeypatch.setenv("LIGHTNING_PARALLEL_SECRET", "0123456789abcdef")
    with all_in_a_step(hosts, tmp_path, "replicas") as started:
        servers = servers_of(hosts[1])
        assert len(servers) == 2
        for server in servers:
            os.kill(server, signal.SIGKILL)
    outputs = [process.communicate(timeout=100)[0] for process in started]
    lines = re.findall(r"rank (\d) node (\d), val_loss (\S+)", "".join(outputs))
    expected = float(fit("auto")[0].callback_metrics["val_loss"])
    assert sorted(line[:2] for line in lines) == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")], outputs
    assert all(float(line[2]) == pytest.approx(expected, abs=2e-6) for line in lines)


@pytest.mark.timeout(200)  # one script starts after the other has come far
def test_a_worker_that_torchrun_starts_again_on_another_host_joins(hosts, tmp_path, monkeypatch):
    """Rank 1 is killed after two of eight batches; rank 0 trains on what it leaves, and the second epoch is both's.

    The evaluation before the fit is over then, and the new worker has its result.
    """
    monkeypatch.setenv("LIGHTNING_PARALLEL_SECRET", "0123456789abcdef")
    os.mkfifo(tmp_path / "there")
    script = tmp_path / "train.py"
    script.write_text(AGAIN)
    options = ["--nproc-per-node", "1", "--max-restarts", "1"]
    started = [start(host, script, number, options=options) for number, host in enumerate(hosts)]
    said = "".join(process.communicate(timeout=190)[0] for process in started)
    found = sorted(re.findall(r"rank (\d) attempt (\d) before (\S+)", said))
    assert [one[:2] for one in found] == [("0", "0"), ("1", "1")] and found[0][2] == found[1][2], said
    own = [share(0, place, 2) for place in range(2)]
    alone = [[batch] for batch in (*own[0][AT:], *own[1][AT:])]
    second = side_by_side(*(share(1, place, 2) for place in range(2)))
    weights = reference([*side_by_side(*(batches[:AT] for batches in own)), *alone, *second]).state_dict()
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), weights, **WEIGHTS)


def test_l_bfgs_on_servers_of_two_hosts_is_that_of_one_process(hosts, tmp_path, monkeypatch):
    """A step is of the rows of both hosts' workers; its vectors lie on both hosts' servers."""
    monkeypatch.setenv("LIGHTNING_PARALLEL_SECRET", "0123456789abcdef")
    results = run(hosts, tmp_path, text=TOGETHER)
    assert [status for status, _ in results] == [0, 0], results
    plain, _ = sandblaster.run("auto", 1, sandblaster.Wolfe, gradient_clip_val=0.2)
    for rank in range(4):
        weights = torch.load(tmp_path / f"weights{rank}.pt")
        torch.testing.assert_close(weights, dict(plain.state_dict()), **sandblaster.CLOSE)


def test_without_a_secret_nobody_is_taken_in(hosts, tmp_path, monkeypatch):
    monkeypatch.delenv("LIGHTNING_PARALLEL_SECRET", raising=False)
    for status, said in run(hosts, tmp_path, text=SERVERS):
        assert status != 0 and "LIGHTNING_PARALLEL_SECRET is not set. Set it to the same 16 or more" in said
