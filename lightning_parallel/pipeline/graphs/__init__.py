"""Blocks as CUDA graphs."""
