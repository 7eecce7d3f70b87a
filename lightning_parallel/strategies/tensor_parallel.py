"""`TensorParallelStrategy`: every rank computes with its heads, features and vocabulary rows of every layer.

The one idea: it is `HybridStrategy` with one axis. A step is one stage and one micro-batch; what ranks say to each
other are the sums and gathers inside layers.
"""

from __future__ import annotations

from typing import Any

from lightning_parallel.parallel.plan import Plan
from lightning_parallel.strategies.hybrid import HybridStrategy


class TensorParallelStrategy(HybridStrategy):
    """Cuts matrix products, attention heads and vocabulary over all ranks; all see the same rows.

    Args:
        tensor_parallel_size: how many ranks; None: all devices.
        tensor_plan: see `HybridStrategy`.
        data_parallel_size, pipeline_parallel_size: see `HybridStrategy`.
        **kwargs: see `HybridStrategy`.

    Raises:
        ValueError: an argument is not as described; when training starts, the plan does not fit the model.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=TensorParallelStrategy())  # doctest: +SKIP

    Source:
        Shoeybi et al., Megatron-LM, arXiv 1909.08053.
    """

    def __init__(
        self,
        tensor_parallel_size: int | None = None,
        tensor_plan: Plan = "auto",
        data_parallel_size: int | None = 1,
        pipeline_parallel_size: int | None = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_parallel_size, pipeline_parallel_size, tensor_parallel_size, tensor_plan=tensor_plan, **kwargs
        )
