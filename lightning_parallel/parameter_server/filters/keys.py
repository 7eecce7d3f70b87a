"""Lists of places that both sides know already are sent as a digest.

The one idea: who pushes the same places again sends eight bytes for them; a server that does not know the digest,
because it took the range over, says so and gets the list. Left out: values.

Source:
    Li et al., OSDI 2014, section 4.2 (key caching).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch

from lightning_parallel.parameter_server.messages import Coded, Values

KNOWN = 8  # lists that a server keeps for each worker and range


class SentKeys:
    """The sender's side: what the head of a range was sent in this view."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()

    def shrink(self, key: int, values: Values | None) -> Values | None:
        """The same values, with a digest in place of places that were sent before."""
        if not isinstance(values, Coded) or not values.codec.endswith("+sparse"):
            return values
        name = digest(values)
        if (key, name) not in self._known:
            self._known = {known for known in self._known if known[0] != key} | {(key, name)}
            return values
        codec = values.codec.replace("+sparse", "+cached")
        return Coded(codec, values.length, (values.parts[0], torch.tensor([name])), values.numbers)

    def forget(self) -> None:
        """Another server may be head now."""
        self._known.clear()


class ReceivedKeys:
    """The receiver's side, of one range."""

    def __init__(self) -> None:
        self._known: dict[int, OrderedDict[int, torch.Tensor]] = {}

    def expand(self, worker: int, values: Values | None) -> tuple[bool, Values | None]:
        """Whether the places are known, and the values with them."""
        if not isinstance(values, Coded) or "+" not in values.codec:
            return True, values
        if not _has_places(values):
            return True, values  # which no vector can be made of
        known = self._known.setdefault(worker, OrderedDict())
        if values.codec.endswith("+sparse"):
            known[digest(values)] = values.parts[1]
            if len(known) > KNOWN:
                known.popitem(last=False)
            return True, values
        places = known.get(int(values.parts[1]))
        if places is None:
            return False, None
        codec = values.codec.replace("+cached", "+sparse")
        return True, Coded(codec, values.length, (values.parts[0], places), values.numbers)


def digest(values: Coded) -> int:
    """63 bits of the places."""
    raw = values.parts[1].numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1


def _has_places(values: Coded) -> bool:
    """Whether there is a list of places of a vector, or one digest of such."""
    if len(values.parts) != 2:
        return False
    places = values.parts[1]
    if values.codec.endswith("+cached"):
        return places.numel() == 1 and places.dtype == torch.int64
    return places.dtype == torch.int32 and places.numel() <= values.length
