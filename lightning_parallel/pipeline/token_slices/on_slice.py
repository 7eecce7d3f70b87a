"""A block's call on one slice, and once more in the backward where blocks are computed again.

The one idea: what a slice's call depends on beside its arguments (keys and values of earlier slices, random numbers,
where the step called the block) is set within the call, so that `torch.utils.checkpoint` may repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.stage import calls
from lightning_parallel.pipeline.stage.cut import CutModel
from lightning_parallel.pipeline.stage.unit_calls import versions
from lightning_parallel.pipeline.token_slices.attention import KeysAndValues, SlicedAttention
from lightning_parallel.pipeline.token_slices.call import BlockCall


@dataclass(frozen=True)
class BlockOnSlice:
    """A block's call on one slice.

    Args:
        call, cut: the call, and what of it is computed again.
        before: keys and values of the slices before it.
        end, length: the position behind the slice's last, and T.
        stream: its random numbers, see `call.stream_of`.
    """

    call: BlockCall
    cut: CutModel
    before: Sequence[KeysAndValues]
    end: int
    length: int
    stream: int

    @property
    def is_repeated(self) -> bool:
        """Whether the whole call is computed again in the backward."""
        asked = self.cut.recomputes_blocks(self.call.hook.stage) or self.call.is_checkpointed
        return asked and self.call.surroundings.trains

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, SlicedAttention]:
        """What the block returns, and its attention with its own keys and values.

        Raises:
            ValueError: it is to be computed again, and writes into an argument.
            PhantomError: it is, and some of it is anyway.
        """
        if not self.is_repeated:
            return self._once(args, kwargs)
        before = versions(args, kwargs)
        with self.cut.keep_inputs():  # of what comes by place
            found = checkpoint(
                lambda *args: self._once(args, kwargs), *args, use_reentrant=False, preserve_rng_state=False
            )
        if versions(args, kwargs) != before:
            raise ValueError(calls.written_by(self.call.hook.name))
        if found[1].is_repeated:
            raise PhantomError(
                f"Block `{self.call.hook.name}` is computed again as a whole, and holds a checkpoint of its own, which"
                " token slices do not do at once. Leave one of them out."
            )
        return found

    def attention(self) -> SlicedAttention:
        """What attention finds in the call."""
        return SlicedAttention(self.before, self.end, self.length, forbids=self.call.forbids)

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, SlicedAttention]:
        self.cut.streams.start(self.stream)
        with self.call.surroundings.again(), self.attention() as attention:
            result = self.call.module(*args, **kwargs)
        return result, attention
