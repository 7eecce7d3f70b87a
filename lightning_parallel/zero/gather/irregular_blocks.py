"""Which blocks of a model are used in other ways than by one call each, in the order in which they lie.

The one idea: the forwards of one step are watched, with all parameters whole. A block that is called again, before one
that comes earlier, or within another, and a parameter that the step reads outside of its block's call (a norm of
weights in the loss) are noted. Asking a parameter for its shape is no reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

_READ = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that show values
_ASK = {"size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "is_complex", "element_size"}


class IrregularBlocks(TorchFunctionMode):
    """Watches a step.

    Args:
        place_of: of each parameter, a number of the caller's.

    Attributes:
        found: numbers of blocks that are called in other ways.
        read: stages, and places of what they read outside of calls of blocks.
    """

    def __init__(self, place_of: Mapping[nn.Parameter, int]) -> None:
        super().__init__()
        self._place_of, self.found, self.read = place_of, set[int](), set[tuple[int, int]]()
        self._last, self._inside, self._was_on, self._watches, self._stage = -1, 0, False, False, 0

    def begin(self, stage: int, forward: bool) -> None:
        """An action of a stage begins: a forward or a backward."""
        self._stage, self._last, self._watches = stage, -1, forward

    def end(self) -> None:
        """It is over."""
        self._watches = False

    def enter(self, block: int) -> None:
        """A block is called. What runs inside does not see this mode: a compiled block would be compiled for it."""
        if (block <= self._last or self._inside) and self._watches:
            self.found.add(block)
        self._last = max(self._last, block)
        self._inside += 1
        if self._inside == 1:
            self._was_on = _get_current_function_mode() is self
            if self._was_on:
                self.__exit__(None, None, None)

    def leave(self) -> None:
        """The call is over."""
        self._inside -= 1
        if not self._inside and self._was_on:
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._watches and not self._inside and not _asks(func):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self._place_of:
                    self.read.add((self._stage, self._place_of[leaf]))
        return func(*args, **kwargs)


def _asks(func: Any) -> bool:
    """Whether a function only asks what a tensor is like."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _READ
    return name in _ASK
