"""The memory of a process that forks often, in pages of 2 MiB: a fork copies a table of 4 KiB pages
entry by entry, which is four fifths of its time.

Linux may merge pages where a process asks for it (madvise(2), MADV_HUGEPAGE and, since 6.1,
MADV_COLLAPSE); elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

_HUGEPAGE, _COLLAPSE = 14, 25
_SIZE = 2 << 20


def merge_pages() -> int:
    """Ask for large pages in the memory that this process has now; return their bytes."""
    if sys.platform != "linux":
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(
        size
        for place, size in list(_anonymous())
        if advise(place, size, _HUGEPAGE) == advise(place, size, _COLLAPSE) == 0
    )


def _anonymous() -> Iterator[tuple[int, int]]:
    """Yield address and size of the large pages that writable memory without a file has room for."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, access, _, _, file, *name = line.split()
            if access != "rw-p" or file != "0" or name[:1] == ["[stack]"]:
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = -(-begin // _SIZE) * _SIZE
            end = end // _SIZE * _SIZE
            if end > begin:
                yield begin, end - begin
