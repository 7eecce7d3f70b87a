"""Strategies: what goes to `Trainer(strategy=...)`."""

from lightning_parallel.strategies import registry  # noqa: F401  (registers the strings)
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.pipeline import PipelineStrategy

__all__ = ["MeshStrategy", "PipelineStrategy"]
