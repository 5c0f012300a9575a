"""Stalls: which rank does not come, told from what each rank notes of itself in a file beside the others'.

Files, not messages: a rank that hangs cannot be asked, and the run's folder is there on all ranks. No clocks are compared:
a rank notes how long it has stood still by its own clock, and is silent when its note does not change.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.launch.elastic.client import what_waits


@dataclass(frozen=True)
class Note:
    """What a rank notes of itself.

    Attributes:
        rank: which.
        host: its host's name.
        pid: its process.
        step: optimizer steps taken.
        waiting: what it waits for the others with, "" where it waits for nobody.
        tensors: the names of the tensors that wait with it.
        still_s: seconds for which its main thread has not got on.
        number: of the note, rising.
    """

    rank: int
    host: str
    pid: int
    step: int
    waiting: str
    tensors: tuple[str, ...]
    still_s: float
    number: int


class Notes:
    """The notes of all ranks: `rank<N>.json` in a folder."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """Write nothing yet; the folder is there."""
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._number = 0
        now = time.monotonic()
        self._seen = dict.fromkeys(range(world_size), (0, now))  # rank -> the number of its note, and when it was new here

    def write(self, step: int, waiting: str, tensors: list[str], still_s: float) -> None:
        """Write this rank's note."""
        self._number += 1
        own = (socket.gethostname(), os.getpid(), step, waiting, tuple(tensors), still_s, self._number)
        path = self._folder / f"rank{self._rank}.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(dataclasses.asdict(Note(self._rank, *own))))
        draft.replace(path)

    def read(self) -> tuple[dict[int, Note], dict[int, float]]:
        """Return the notes of all ranks, and the seconds since each rank's note has changed."""
        notes, silent = {}, {}
        now = time.monotonic()
        for rank in range(self._world_size):
            try:
                content = json.loads((self._folder / f"rank{rank}.json").read_text())
                note = Note(**content | {"tensors": tuple(content["tensors"])})
            except (OSError, ValueError, TypeError, KeyError):  # not written yet, or by a host that has another disk
                note = Note(rank, "of unknown host", 0, -1, "", (), 0.0, 0)
            if self._seen[rank][0] != note.number:
                self._seen[rank] = note.number, now
            notes[rank], silent[rank] = note, now - self._seen[rank][1]
        return notes, silent


def find_stall(notes: Mapping[int, Note], silent: Mapping[int, float], world_size: int, timeout_s: float) -> str | None:
    """Say who keeps the others waiting, or return None where nobody does.

    Args:
        notes: of ranks.
        silent: seconds since each note has changed.
        world_size: number of ranks.
        timeout_s: so long a rank may wait for others before one that does not come counts as stalled.
    """
    speaking = [note for rank, note in sorted(notes.items()) if silent[rank] < timeout_s]
    waiting = [note for note in speaking if note.waiting and note.still_s >= timeout_s]
    if not waiting:
        return None
    stuck = [note for note in speaking if not note.waiting and note.still_s >= timeout_s]
    frozen = [note for rank, note in sorted(notes.items()) if silent[rank] >= timeout_s]
    if not stuck and not frozen and len(waiting) < world_size:
        return None
    told = [f"{_name(n)} has not got on for {n.still_s:.0f} s at step {n.step}, and waits for nobody" for n in stuck]
    told += [f"{_name(n)} has been frozen or cut off for {silent[n.rank]:.0f} s; it was at step {n.step}" for n in frozen]
    if not told:
        told = ["All ranks wait, and not for the same: their calls do not match"]
    for note in waiting:
        told.append(f"  {_name(note)} waits, at step {note.step}, for {what_waits(note.waiting, note.tensors)}")
    return ".\n".join(told)


def _name(note: Note) -> str:
    return f"rank {note.rank} ({note.host}, process {note.pid})"
