"""Memory that this process has freed, and that its allocators keep for later, given back to the system.

Values of many bytes come and go in other sizes, and from other threads, than those before them. What an allocator keeps
of them serves few of the next ones, so that a worker would grow to several times its state.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import pyarrow as pa

#: After less than this, it is not worth the time.
_BYTES_MIN = 8 * 1024 * 1024
#: What small values leave free serves the next ones: these have it at once, without the system.
_ROW_BYTES_MIN = 4 * 1024


def give_back_after(rows: int, size: int) -> None:
    """Give back what is free after work on rows of state that have this size together."""
    if size >= _BYTES_MIN and size >= rows * _ROW_BYTES_MIN:
        pa.default_memory_pool().release_unused()
        _trim()(0)


@cache
def _trim() -> Callable[[int], object]:
    """What glibc has for it; other C libraries give memory back by themselves, or never."""
    if sys.platform == "linux":
        trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            return trim
    return lambda _: None
