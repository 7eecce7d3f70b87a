"""Where the ranks of a launcher of ours meet."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_parallel.ports import ReservedPort


def main_port(environment: ClusterEnvironment) -> tuple[int, ReservedPort | None]:
    """The port at which the ranks of a run meet, and its reservation where nobody said which one it shall be."""
    named = "MASTER_PORT" in os.environ or "STANDALONE_PORT" in os.environ
    if named or not isinstance(environment, LightningEnvironment):
        return environment.main_port, None
    reserved = ReservedPort()
    return reserved.number, reserved
