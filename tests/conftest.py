"""What every test starts from: no GPU, one torch thread, the same seeds, loopback only. Warnings are errors.

Tests of GPUs are those of `tests/gpu`.
"""

import os

if os.environ.get("TEST_GPUS") != "1":  # `make test-gpu` sets it; ranks are forked, and Lightning warns of unused GPUs
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.harness import free_port, release_ports, remember_children
from tests.missing_packages import (  # noqa: F401  (hooks)
    pytest_make_collect_report,
    pytest_runtest_call,
    pytest_runtest_setup,
)

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of scripts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
torch.set_num_threads(1)
settings.register_profile("same", derandomize=True)
settings.register_profile("others", derandomize=False)
settings.load_profile("same")  # `make test-all` asks for the others
# The collector writes into every object that it looks at, and a forked rank copies each page on which it does. What was
# there before a fork it need not look at: half a million objects, 0.3 s of a processor and 200 MB a rank.
os.register_at_fork(after_in_child=gc.freeze)
# A gloo thread polls without pause while another thread of its rank holds a connection's lock. Who is waked does not
# displace a process of this kind, so that fewer ranks are stopped in such a moment: a tenth of all processor time.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_finish() -> None:
    """What imports and collection made stays to the end; the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what a test before left of seed_everything
        os.environ.pop(name, None)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ports_and_children() -> Iterator[None]:
    remember_children()
    yield
    release_ports()


@pytest.fixture
def port() -> int:
    """A free TCP port of the loopback device."""
    return free_port()
