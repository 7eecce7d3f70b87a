"""Checkpoints: one file as one process writes it, a folder that ranks write together, weights from elsewhere."""

from lightning_parallel.checkpoint.weights import load_weights

__all__ = ["load_weights"]
