"""The old path of `lightning_parallel.pipeline.planning.choice`."""

from lightning_parallel._moved import moved

__getattr__ = moved(__name__, "lightning_parallel.pipeline.planning.choice")
