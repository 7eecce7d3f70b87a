"""Token slices: a sequence is cut, and its pieces are pipelined as micro-batches are."""

from __future__ import annotations

from lightning_parallel.pipeline.schedule import Action, Schedule
from lightning_parallel.pipeline.schedules.placement import straight
from lightning_parallel.pipeline.schedules.spec import require, write


def terapipe(num_ranks: int, num_microbatches: int, slices: int = 4) -> Schedule:
    """All slices of all micro-batches go forward in order, then back in exactly the reverse order.

    A slice of a causal model needs the slices before it (their keys and values), so that micro-batch by micro-batch
    slices go forward in increasing order; their gradients come back in decreasing order. With K slices of equal time
    the bubble is GPipe's for M K micro-batches, ``(D - 1) / (M K + D - 1)``; all M micro-batches are held. Slices
    later in a sequence attend to more and take longer: equal times need slices of decreasing length
    (``PipelineStrategy(slices=[...])``, and ``slice_lengths`` for which).

    Blocks run on slices; what the step does before and behind them runs on whole micro-batches, so the loss is
    computed with the last slice of each. The first step of every new shape runs whole sequences: there each block is
    tried on slices. Blocks whose positions meet in anything but causal ``scaled_dot_product_attention`` or
    ``nn.MultiheadAttention`` are refused by name. See docs/design.md.

    Args:
        num_ranks: D.
        num_microbatches: M.
        slices: K.

    Raises:
        ValueError: ``slices`` is below 1.

    Example:
        >>> print(terapipe(2, 1, slices=2).to_text())
        0F0s0 0F0s1 0B0s1 0B0s0
        1F0s0 1F0s1 1B0s1 1B0s0

    Source:
        Li et al., TeraPipe, arXiv 2102.07988; the order of forwards and backwards as in its authors' code.
    """
    name = write("terapipe", {"slices": slices} if slices != 4 else {})
    require(name, slices >= 1, f"got slices={slices}", "Use 1 or more.")
    rows = []
    for stage in range(num_ranks):
        pieces = [(m, piece) for m in range(num_microbatches) for piece in range(slices)]
        forwards = [Action("F", stage, m, slice=piece) for m, piece in pieces]
        rows.append((*forwards, *(Action("B", stage, m, slice=piece) for m, piece in reversed(pieces))))
    return Schedule(name, tuple(rows), straight(num_ranks), num_microbatches)
