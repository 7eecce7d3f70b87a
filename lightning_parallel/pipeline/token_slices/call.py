"""A block's call that was noted to be made later, slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.phantom import Phantom
from lightning_parallel.pipeline.phantoms.stand_in import version_of
from lightning_parallel.pipeline.stage.cut import Hook
from lightning_parallel.pipeline.stage.random_streams import mix
from lightning_parallel.pipeline.token_slices.attention import forbids, is_checkpointed


class Surroundings:
    """What decides how operators compute where a call was noted: gradients (`trains`), autocast, the default dtype."""

    def __init__(self, device: torch.device) -> None:
        self.trains, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._casts = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {"cpu", device.type}
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same for a call that is made now."""
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.trains))
            for kind, (dtype, enabled) in self._casts.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            torch.set_default_dtype(self._dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


@dataclass
class BlockCall:
    """A call of a block, with what the step handed to it.

    Args:
        hook: which block.
        module: its own `__call__`.
        args, kwargs: tensors that are there, and Phantoms for what blocks before it return.
        surroundings: where the step called it.

    Attributes:
        forbids: see `attention.forbids`.
        is_checkpointed: whether the step called it by torch.utils.checkpoint.
    """

    hook: Hook
    module: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    surroundings: Surroundings

    def __post_init__(self) -> None:
        self.forbids, self.is_checkpointed = forbids(self.hook), is_checkpointed()
        self._versions = [(x, version_of(x)) for x in tree_flatten((self.args, self.kwargs))[0] if _is_real(x)]

    def refuse_written(self) -> None:
        """Raise if the step wrote into an argument after it made the call.

        Raises:
            PhantomError: it did.
        """
        if any(version_of(x) != version for x, version in self._versions):
            raise PhantomError(
                f"The step writes into an argument of `{self.hook.name}` after it called it, which token slices read"
                " later. Use an operator that is not in place."
            )


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, Phantom)


def stream_of(hook: Hook, key: int, number: int) -> int:
    """The stream of random numbers of a block's call with slice `number`."""
    return key ^ hook.own_stream ^ mix(number, 2)
