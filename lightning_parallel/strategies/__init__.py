"""Strategies: what goes to `Trainer(strategy=...)`."""

from lightning_parallel.strategies import registry  # noqa: F401  (registers the strings)
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.hybrid import HybridStrategy
from lightning_parallel.strategies.parameter_server import ParameterServerStrategy
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.strategies.tensor_parallel import TensorParallelStrategy
from lightning_parallel.strategies.zero import ZeROStrategy

__all__ = [
    "HybridStrategy",
    "MeshStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
]
