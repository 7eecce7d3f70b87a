"""Intra-operator parallelism: matrix products, embeddings and losses cut over the ranks of a tensor axis.

The one idea: a rank holds a plain tensor, its shard, and Megatron's conjugate operators stand around each pair of
products: the first copies its input and sums gradients, the second sums its output and copies gradients. Plain tensors
go through everything else that this library does to parameters (flat buckets, split backwards, fused optimizers); how a
shard lies in the whole is said by `Shares` where somebody asks, in DTensor's words.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053; Korthikanti et al., Reducing activation recomputation,
arXiv 2205.05198 (sequence parallelism).
"""
