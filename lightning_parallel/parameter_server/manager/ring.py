"""Consistent hashing: which servers hold which range, so that few ranges move when a server comes or goes.

The one idea: every server lies on a circle at many pseudo-random places (virtual nodes), every range at one; a range is
held by the next so many different servers along the circle, on different hosts as long as there are any. Left out: how
a range moves (``chain_steps.py``).

Source:
    Karger et al., Consistent Hashing and Random Trees, STOC 1997; Li et al., OSDI 2014, section 4.3 (primary and the
    next neighbours as replicas).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache


class Ring:
    """Servers on a circle.

    Args:
        servers: names; where there are several hosts, name -> host.
        virtual_nodes: places that each server has; with more, ranges are spread more evenly.

    Example:
        >>> before = Ring(["a", "b", "c", "d"])
        >>> after = Ring(["a", "b", "c"])
        >>> kept = [key for key in range(100) if before.holders(key, 1) != ("d",)]
        >>> all(before.holders(key, 1) == after.holders(key, 1) for key in kept)
        True
        >>> Ring(["a", "b", "c"]).holders(1, 2), Ring({"a": "one", "b": "one", "c": "two"}).holders(1, 2)
        (('a', 'b'), ('a', 'c'))
    """

    def __init__(self, servers: Iterable[str] | Mapping[str, str], virtual_nodes: int = 64) -> None:
        self.servers = sorted(set(servers))
        self._hosts = dict(servers) if isinstance(servers, Mapping) else dict.fromkeys(self.servers, "")
        self._num_hosts = len(set(self._hosts.values()))
        self._places = sorted(place for server in self.servers for place in _places(server, virtual_nodes))

    def holders(self, key: int, replicas: int) -> tuple[str, ...]:
        """The servers of a range: primary first, then its successors; fewer where there are fewer servers."""
        start = bisect.bisect(self._places, (_place(f"range {key}"), ""))
        around = self._places[start:] + self._places[:start]
        found: dict[str, str] = {}  # server -> host
        for _, server in around:
            if len(found) == min(replicas, self._num_hosts):
                break
            if self._hosts[server] not in found.values():
                found[server] = self._hosts[server]
        for _, server in around:
            if len(found) == min(replicas, len(self.servers)):
                break
            found.setdefault(server, self._hosts[server])
        return tuple(found)


@lru_cache(maxsize=1024)
def _places(server: str, virtual_nodes: int) -> tuple[tuple[int, str], ...]:
    return tuple((_place(f"{server}#{node}"), server) for node in range(virtual_nodes))


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
