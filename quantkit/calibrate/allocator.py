"""Freed memory kept for the next block, where the C library is glibc.

It asks the system for every block above 32 MiB anew and gives it back when it is freed, so all of
its pages are faulted in and cleared
again: a tenth of the processor time of an expert at R1's shapes. Other libraries have their own
way, and nothing is changed.
"""

import ctypes

LARGEST_KEPT = 2**28
"""Bytes of a block. Larger ones (Hessians, the weights of a dense MLP) go back at once: they make a
run's peak."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


def keep_freed_blocks() -> None:
    """From here on, in this process. Up to LARGEST_KEPT bytes stay at the end of the heap."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, LARGEST_KEPT)


def give_back() -> None:
    """Free pages, wherever they lie, to the system."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
