"""The old path of `lightning_parallel.parameter_server.launcher`."""

from lightning_parallel._moved import moved

__getattr__ = moved(__name__, "lightning_parallel.parameter_server.launcher")
