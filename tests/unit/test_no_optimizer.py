"""A `configure_optimizers` that returns None, which Lightning allows, has nothing to divide and nothing to serve."""

import pytest
from lightning.pytorch.core.optimizer import _MockOptimizer

from lightning_parallel import ParameterServerStrategy
from lightning_parallel.parameter_server.trainer.server_plan import ServerPlan
from lightning_parallel.zero.optimizer.elementwise import refuse_optimizer


def test_no_optimizer_is_refused_by_what_was_returned():
    with pytest.raises(ValueError, match=r"ZeROStrategy divides .+ and configure_optimizers returned None"):
        refuse_optimizer(_MockOptimizer(), "ZeROStrategy")
    with pytest.raises(ValueError, match=r"P has the servers make .+ and configure_optimizers returned None"):
        ServerPlan(ParameterServerStrategy().wishes, [_MockOptimizer()], 2, "P")
