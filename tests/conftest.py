"""What every test starts from: one torch thread, the same seeds, loopback only. Warnings are errors (pyproject)."""

import os
import random

import numpy as np
import pytest
import torch

from tests.harness import free_port

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def port() -> int:
    """A free TCP port of the loopback device."""
    return free_port()
