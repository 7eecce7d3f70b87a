"""Checkpoints within blocks: attention that a backward computes again finds what earlier slices left.

The one idea: a checkpoint puts back the random numbers with which it began, and a block's call on a slice has a stream
of its own. So the stream says which call is repeated, and with which keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage.random_streams import RandomStreams
from lightning_parallel.pipeline.token_slices.on_slice import BlockOnSlice

_LOST = (
    "A block is computed again in the backward (torch.utils.checkpoint), and nothing says for which slice of which"
    " block: checkpoints with preserve_rng_state=False, or around several attentions, do not go with token slices. Use"
    ' PipelineStrategy(recompute="block"), or a schedule of whole micro-batches.'
)


class RepeatedSlices(TorchFunctionMode):
    """While it is entered, the backward of a slice runs.

    Args:
        calls: the blocks' calls that checkpoints repeat, by stream; None for blocks of several attentions.
        streams: the random numbers.
    """

    def __init__(self, calls: Mapping[int, BlockOnSlice | None], streams: RandomStreams) -> None:
        super().__init__()
        self._calls, self._streams = calls, streams

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            return func(*args, **(kwargs or {}))
        call = self._calls.get(self._streams.stream)
        if call is None:
            raise PhantomError(_LOST)
        return call.attention().__torch_function__(func, types, args, kwargs)
