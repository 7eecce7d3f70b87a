"""Keeps freed memory in the process, so that large buffers that come and go are not mapped anew each time.

The one idea: glibc gives blocks of many megabytes back to the system as soon as they are free, and the next one costs
a page fault for every 4 kB; two settings of its allocator turn that off. Left out: other C libraries, where nothing
happens.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Turn off giving back, for this process; whether the C library knows how."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
