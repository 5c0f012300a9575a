"""What gzip packed, from a file of elsewhere: bounded, and as far as it is intact."""

from __future__ import annotations

import contextlib
import zlib

from trainkit.errors import CheckpointError

MOST_UNPACKED = 4 << 30  # bytes of a compressed file, once unpacked
_CHUNK, _MOST_AT_ONCE = 1 << 16, 1 << 24  # bytes in, bytes out


def unpack_bounded(content: bytes) -> bytes:
    """Return what gzip packed; of a file that was cut off or damaged, the intact beginning.

    Raises:
        CheckpointError: it is larger than MOST_UNPACKED.
    """
    text, unpacker = bytearray(), zlib.decompressobj(31)
    with contextlib.suppress(zlib.error):
        for at in range(0, len(content), _CHUNK):
            rest = content[at : at + _CHUNK]
            while rest:
                text += unpacker.decompress(rest, _MOST_AT_ONCE)
                rest = unpacker.unconsumed_tail
                if len(text) > MOST_UNPACKED:
                    raise CheckpointError(
                        f"A recording is refused: unpacked it has more than {MOST_UNPACKED >> 20}"
                        " MiB."
                    )
    return bytes(text)
