"""Tensors from rank to rank: channels, headers, and the groups of a model's replica."""
