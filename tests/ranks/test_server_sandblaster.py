"""Sandblaster as real processes: helpers read the point from the servers; a helper, a server and the manager are
killed."""

import os
import signal

import numpy as np
import pytest
import scipy.optimize
import torch

from lightning_parallel.parameter_server import AddDelta, Asynchronous, Layout, Rules
from lightning_parallel.parameter_server.job import Job
from lightning_parallel.parameter_server.launcher import launch
from lightning_parallel.parameter_server.sandblaster.lbfgs import LBFGS
from tests.harness import _fork

COLUMNS, PORTIONS = 5, 8
pytestmark = pytest.mark.timeout(120)


def portion_of(x: torch.Tensor, portion: int) -> tuple[float, torch.Tensor]:
    """A convex loss, its portions each with a minimum of their own."""
    x = x.clone().requires_grad_()
    target = torch.arange(COLUMNS, dtype=torch.float64) - portion / 3
    loss = (torch.log(torch.cosh(x - target)) + 0.1 * (portion + 1) * x**2).sum()
    loss.backward()
    return loss.item(), x.grad


def whole(x: np.ndarray) -> tuple[float, np.ndarray]:
    results = [portion_of(torch.from_numpy(x), portion) for portion in range(PORTIONS)]
    return sum(loss for loss, _ in results), sum(gradient for _, gradient in results).numpy()


def help_out(job: Job, name: str, pipe, dies: bool) -> None:
    torch.set_num_threads(1)
    helper, count = job.help(name, timeout=60.0).start(torch.zeros(COLUMNS)), 0

    def compute(x: torch.Tensor, portion: int) -> tuple[float, torch.Tensor]:
        nonlocal count
        count += 1
        if dies and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)  # with a portion in hand
        pipe.send(x.tolist())
        return portion_of(x, portion)

    helper.work(compute)


def test_it_is_scipys_minimum_while_processes_are_killed():
    rules = Rules(Layout(COLUMNS, 2), AddDelta(), Asynchronous(), lease=2.0, resend_after=0.3)
    with launch(rules, 3, 0) as started:
        pipes = [_fork.Pipe() for _ in range(3)]
        args = [(started.job, f"h{index}", theirs, index == 0) for index, (_, theirs) in enumerate(pipes)]
        helpers = [_fork.Process(target=help_out, args=one, daemon=True) for one in args]
        for process in helpers:
            process.start()
        coordination = started.job.coordinate(timeout=60.0).start()
        shards, batches = coordination.shards, 0

        def evaluate() -> float:
            nonlocal batches
            batches += 1
            if batches == 4:
                for name in ("s1", "manager"):
                    os.kill(started.processes[name].pid, signal.SIGKILL)
                    started.processes[name].join()
                started.start_manager()
            return shards.share(PORTIONS)

        loss = LBFGS(shards, evaluate, tolerance=1e-7).run()
        seen = [pipes[index][0].recv() for index in (1, 2) for _ in range(1000) if pipes[index][0].poll()]
        coordination.close()
        for process in helpers:
            process.kill()
            process.join()
    reference = scipy.optimize.minimize(whole, np.zeros(COLUMNS), jac=True, method="L-BFGS-B", options={"gtol": 1e-10})
    assert batches > 4 and loss == pytest.approx(reference.fun, abs=1e-8)
    assert min(np.abs(np.array(x) - reference.x).max() for x in seen) < 1e-6
