"""Gathering bytes of each rank, again and again, by one collective whose sizes stay.

    a rank's room     | length, 8 bytes | its bytes ... | unused |

Horovod negotiates a collective again only if its shape changes. If a rank's bytes outgrow its room,
all ranks read so in the lengths, enlarge that room, and gather once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainkit.engine.collectives import Collectives

_HEAD = 8
_ROOM = 24 * 1024  # a rank's random states and a few epoch means
_GRAIN = 4096


class Gathering:
    """See the module. Make it, and use it, on all ranks; make another one when ranks change."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._rooms: list[int] = []

    def start(self, own: bytes) -> Callable[[], list[memoryview]]:
        """Start to gather; return the function that waits,
        and returns the bytes of all ranks in their order.
        """
        self._rooms = self._rooms or [_ROOM] * self._comm.ranks.world_size
        wait = self._comm.start_gather(self._laid_out(own))
        return lambda: self._finish(wait, own)

    def _finish(self, wait: Callable[[], Tensor], own: bytes) -> list[memoryview]:
        while True:
            everyone = memoryview(wait().numpy().data)
            starts = [sum(self._rooms[:rank]) for rank in range(len(self._rooms))]
            sizes = [
                _HEAD + int.from_bytes(everyone[start : start + _HEAD], "little")
                for start in starts
            ]
            if all(size <= room for size, room in zip(sizes, self._rooms, strict=True)):
                return [
                    everyone[start + _HEAD : start + size]
                    for start, size in zip(starts, sizes, strict=True)
                ]
            self._rooms = [
                max(room, _room_for(size)) for size, room in zip(sizes, self._rooms, strict=True)
            ]
            wait = self._comm.start_gather(self._laid_out(own))

    def _laid_out(self, own: bytes) -> Tensor:
        room = bytearray(self._rooms[self._comm.ranks.rank])
        room[:_HEAD] = len(own).to_bytes(_HEAD, "little")
        if _HEAD + len(own) <= len(room):
            room[_HEAD : _HEAD + len(own)] = own
        return torch.frombuffer(room, dtype=torch.uint8)


def _room_for(size: int) -> int:
    """Return a room with a quarter to spare: epoch means grow for a while."""
    return -(-size * 5 // 4 // _GRAIN) * _GRAIN
