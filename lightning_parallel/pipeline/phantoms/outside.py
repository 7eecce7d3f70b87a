"""What may be done with a parameter of another stage outside its module.

The one idea: it may be named, grouped, moved and asked for its shape, and no more; but where nothing except shapes is
asked for, it computes as any Phantom does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ALLOWED = {
    *("__get__", "__set__", "__delete__", "__hash__", "__len__", "__repr__", "requires_grad_", "detach"),
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "element_size"),
    *("is_floating_point", "is_complex", "is_contiguous"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),  # optimizers that make their state at construction
    "copy_",  # into a stand-in: the stage that holds the data does it for real
    *("_has_compatible_shallow_copy_type", "to", "cpu", "cuda"),  # `module.to`
    *("type", "double", "float", "half", "bfloat16"),
}
_shapes_only = [False]


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules of all stages may run, on shapes: inside, parameters of other stages compute as any Phantom does.

    What comes out cannot be read, so this is for asking for shapes (a summary of the model) and nothing else.
    """
    before, _shapes_only[0] = _shapes_only[0], True
    try:
        yield
    finally:
        _shapes_only[0] = before


def asks_for_shapes() -> bool:
    """Whether `shapes_only` holds."""
    return _shapes_only[0]


def is_allowed(func: Callable) -> bool:
    """Whether a function may be given a parameter of another stage, or its gradient."""
    return func.__name__ in _ALLOWED or _shapes_only[0]
