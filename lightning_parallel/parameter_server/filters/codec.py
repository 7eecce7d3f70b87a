"""Between a vector and what travels: a number format, and maybe the places of the elements that were chosen.

``Coded.codec`` is the format's name, then ``+sparse`` if places follow the values, or ``+cached`` if only the digest
of the places does. The one idea: decoding depends on the message alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel.parameter_server.filters.precision import PRECISIONS, Precision
from lightning_parallel.parameter_server.messages import Coded, Values


def encode(values: Tensor, precision: Precision, places: Tensor | None = None) -> Coded:
    """What travels for a vector.

    Args:
        values: shape (n,), float32.
        precision: number format.
        places: shape (k,), which elements are sent, or None for all.

    Example:
        >>> from lightning_parallel.parameter_server.filters import Float16
        >>> coded = encode(torch.tensor([0.0, 3.0, 0.0]), Float16(), torch.tensor([1]))
        >>> coded.codec, decode(coded).tolist()
        ('fp16+sparse', [0.0, 3.0, 0.0])
    """
    chosen = values if places is None else values[places]
    coded, numbers = precision.encode(chosen)
    if places is None:
        return Coded(precision.name, values.numel(), (coded,), numbers)
    return Coded(f"{precision.name}+sparse", values.numel(), (coded, places.to(torch.int32)), numbers)


def decode(values: Values) -> Tensor:
    """The vector that was sent, float32, zeros where an element was not.

    Raises:
        ValueError: the codec has no such name, the places do not fit the length, or only their digest is there.
    """
    if isinstance(values, Tensor):
        return values
    chosen = precision_of(values).decode(values.parts[0], values.numbers)
    if "+" not in values.codec:
        _require(chosen.numel() == values.length, values)
        return chosen
    _require(values.codec.endswith("+sparse") and len(values.parts) == 2, values)
    places = values.parts[1].long()
    fits = places.numel() == chosen.numel() and (
        not places.numel() or bool(places.min() >= 0 and places.max() < values.length)
    )
    _require(fits, values)
    return torch.zeros(values.length).index_copy_(0, places, chosen)


def fits(values: Values | None, length: int) -> bool:
    """Whether values are a float32 vector of a length, or can be decoded to one."""
    if values is None:
        return True
    if isinstance(values, Tensor):
        return values.dtype == torch.float32 and tuple(values.shape) == (length,)
    if values.length != length:  # before anything of the length that it claims is made
        return False
    try:
        return decode(values).numel() == length
    except (ValueError, RuntimeError, IndexError):
        return False


def precision_of(coded: Coded) -> Precision:
    """The number format of what travels."""
    name = coded.codec.split("+")[0]
    _require(name in PRECISIONS and len(coded.parts) > 0, coded)
    return PRECISIONS[name]


def _require(holds: bool, coded: Coded) -> None:
    if not holds:
        sizes = [part.numel() for part in coded.parts]
        raise ValueError(
            f"Cannot decode {coded.codec!r} of length {coded.length} with parts of {sizes} elements. "
            f"Formats are {', '.join(PRECISIONS)}, alone or with +sparse."
        )
