"""Giving freed memory back to the system.

Owns one call of the C library. Batches of ever new sizes leave holes in its heap, which then grows with the number of
rows though nothing is kept; glibc closes the holes when asked.
"""

import ctypes
import sys
from functools import cache
from typing import Any


def return_freed_memory() -> None:
    """Returns what the heap holds of freed tensors; does nothing where the C library is not glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
