"""Stall detection: finds the hung rank from notes that each rank writes about itself into a shared
folder.

Files, not messages: a hung rank cannot answer, and all ranks see the run's folder. No clocks are
compared: a rank records for how long it has been stuck by its own clock, and counts as silent if
its note does not change.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.console import what_waits
from trainkit.safety.whole_files import replacing


@dataclass(frozen=True)
class Note:
    """A rank's note about itself.

    Attributes:
        rank: its number.
        host: its host's name.
        pid: its process.
        step: optimizer steps taken.
        waiting: the collective in which it waits for the others, "" if it does not wait.
        tensors: the names of the tensors waiting in it.
        still_s: seconds since its main thread last made progress.
        number: number of the note, increasing.
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

    def __init__(
        self, folder: Path, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write nothing yet; the folder exists."""
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._number = 0
        now = clock()
        # rank -> number of its note, time first read
        self._seen = dict.fromkeys(range(world_size), (0, now))

    def write(self, step: int, waiting: str, tensors: list[str], still_s: float) -> None:
        """Write this rank's note."""
        self._number += 1
        own = (
            socket.gethostname(),
            os.getpid(),
            step,
            waiting,
            tuple(tensors),
            still_s,
            self._number,
        )
        path = self._folder / f"rank{self._rank}.json"
        with replacing(path) as draft:
            draft.write_text(json.dumps(dataclasses.asdict(Note(self._rank, *own))))

    def read(self) -> tuple[dict[int, Note], dict[int, float]]:
        """Return the notes of all ranks, and the seconds since each note changed."""
        notes = {}
        silent = {}
        now = self._clock()
        for rank in range(self._world_size):
            try:
                content = json.loads((self._folder / f"rank{rank}.json").read_text())
                note = Note(**content | {"tensors": tuple(content["tensors"])})
            except (OSError, ValueError, TypeError, KeyError):
                # not written yet, or written by a host without the shared disk
                note = Note(rank, "of unknown host", 0, -1, "", (), 0.0, 0)
            if self._seen[rank][0] != note.number:
                self._seen[rank] = note.number, now
            notes[rank] = note
            silent[rank] = now - self._seen[rank][1]
        return notes, silent


def find_stall(
    notes: Mapping[int, Note], silent: Mapping[int, float], world_size: int, timeout_s: float
) -> str | None:
    """Name the ranks that block the others, or return None if none does.

    Args:
        silent: seconds since each note changed.
        timeout_s: time that a rank may wait for others before a rank without progress counts as
            hung.
    """
    speaking = [note for rank, note in sorted(notes.items()) if silent[rank] < timeout_s]
    waiting = [note for note in speaking if note.waiting and note.still_s >= timeout_s]
    if not waiting:
        return None
    stuck = [note for note in speaking if not note.waiting and note.still_s >= timeout_s]
    frozen = [note for rank, note in sorted(notes.items()) if silent[rank] >= timeout_s]
    if not stuck and not frozen and len(waiting) < world_size:
        return None
    lines = [
        f"{_name(n)} has made no progress for {n.still_s:.0f} s at step {n.step}, and waits for no"
        " rank"
        for n in stuck
    ]
    lines += [
        f"{_name(n)} has been frozen or cut off for {silent[n.rank]:.0f} s; it was at step {n.step}"
        for n in frozen
    ]
    if not lines:
        lines = ["All ranks wait, but for different collectives: their calls do not match"]
    for note in waiting:
        lines.append(
            f"  {_name(note)} waits, at step {note.step}, for"
            f" {what_waits(note.waiting, note.tensors)}"
        )
    return ".\n".join(lines)


def _name(note: Note) -> str:
    return f"rank {note.rank} ({note.host}, process {note.pid})"
