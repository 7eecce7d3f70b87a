"""`HiddenGradient`: what `parameter.grad` is while DeepSpeed holds the gradients where nobody sees them.

The one idea: a hook that reads or changes a gradient must not be passed over in silence. DeepSpeed leaves None there,
or a sum that no rank has reduced yet; in its place lies something that raises when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class HiddenGradient(Tensor):
    """A gradient whose values raise.

    Args:
        like: the parameter, for shape, dtype and device.
    """

    @staticmethod
    def __new__(cls: type[HiddenGradient], like: Tensor) -> HiddenGradient:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: Tensor) -> None:
        """See the class."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HiddenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"`{func.overloadpacket.__name__}` reads a gradient that DeepSpeed holds for itself. Clip with"
            " self.clip_gradients(...) or Trainer(gradient_clip_val=...), which DeepSpeed's step does; where hooks read"
            ' or change gradients use engine="native" or "fsdp2".'
        )


class Curtain:
    """Puts hidden gradients in front of a module's, and takes them away.

    Args:
        parameters: those that train.

    Example:
        >>> p = nn.Parameter(Tensor([1.0])); p.grad = Tensor([2.0])
        >>> curtain = Curtain([p])
        >>> curtain.draw(); type(p.grad).__name__
        'HiddenGradient'
        >>> curtain.open(); p.grad
        tensor([2.])
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._behind: dict[nn.Parameter, Tensor | None] = {}

    def draw(self) -> None:
        """Hide gradients."""
        for parameter in self.parameters:
            self._behind[parameter] = parameter.grad
            parameter.grad = HiddenGradient(parameter)

    def open(self) -> None:
        """What was there is there again."""
        for parameter, gradient in self._behind.items():
            if isinstance(parameter.grad, HiddenGradient):
                parameter.grad = gradient
        self._behind = {}
