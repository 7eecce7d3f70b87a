"""A block's call on one slice, and once more in the backward where blocks are computed again.

The one idea: what a slice's call depends on beside its arguments (keys and values of earlier slices, random numbers,
where the step called the block) is set within the call, so that `torch.utils.checkpoint` may repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline import calls
from lightning_parallel.pipeline.cut import Cut
from lightning_parallel.pipeline.token_slices.attention import KeysAndValues, SlicedAttention
from lightning_parallel.pipeline.token_slices.call import BlockCall
from lightning_parallel.pipeline.unit_calls import versions


@dataclass(frozen=True)
class BlockOnSlice:
    """A block's call on one slice.

    Args:
        call: the call.
        before: keys and values of the slices before it.
        end, length: the position behind the slice's last, and T.
        stream: its random numbers, see `call.stream_of`.
    """

    call: BlockCall
    before: Sequence[KeysAndValues]
    end: int
    length: int
    stream: int

    def run(self, cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, KeysAndValues]:
        """What the block returns, and its own keys and values; computed again in the backward if `cut` or the step says
        so.

        Raises:
            ValueError: it is to be computed again, and writes into an argument.
        """
        again = cut.recomputes_blocks(self.call.hook.stage) or self.call.is_checkpointed
        if not again or not self.call.surroundings.trains:
            return self._once(cut, args, kwargs)
        before = versions(args, kwargs)
        with cut.keep_inputs():  # of what comes by place
            found = checkpoint(
                lambda *args: self._once(cut, args, kwargs), *args, use_reentrant=False, preserve_rng_state=False
            )
        if versions(args, kwargs) != before:
            raise ValueError(calls.written_by(self.call.hook.name))
        return found

    def _once(self, cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, KeysAndValues]:
        cut.streams.start(self.stream)
        attention = SlicedAttention(self.before, self.end, self.length, forbids=self.call.forbids)
        with self.call.surroundings.again(), attention:
            result = self.call.module(*args, **kwargs)
        return result, attention.own
