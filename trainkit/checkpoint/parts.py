"""Parts of a checkpoint: the files that ranks write side by side, if each holds a part of the weights.

each rank's thread    its pieces -> rank-R-of-N.safetensors -> a report: size, hash, boxes, or the error
rank 0's thread       the same, and training.pt -> waits for all reports -> manifest.json, which makes them one checkpoint

Threads exchange files, not messages: a collective of theirs could overtake one of training. The reports have room for an error
from the start, so that a rank with a full disk can still report it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainkit.checkpoint.files import flush, sha256_of, write_safetensors

_ROOM = 4096  # bytes of a report that are reserved before anything else is written
_POLL_S, _PATIENCE_S = 0.05, 1800.0


class Part(NamedTuple):
    """What one rank writes of a checkpoint.

    Attributes:
        rank, ranks: of the run.
        token: that of all parts of this checkpoint; unique among all attempts to write one.
        tensors: key -> this rank's piece, on the host.
        boxes: key -> (shape and dtype of the whole tensor, where the piece begins, its size).
    """

    rank: int
    ranks: int
    token: int
    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, tuple[list[int], str, list[int], list[int]]]


def file_of(rank: int, ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def report_of(rank: int, ranks: int) -> str:
    """Return the name of a rank's report."""
    return f"rank-{rank}-of-{ranks}.report"


def write_part(folder: Path, part: Part) -> Path:
    """Write a rank's file and its report into a folder; return the report.

    Raises:
        OSError: the write failed; the report says so.
    """
    path, report = folder / file_of(part.rank, part.ranks), folder / report_of(part.rank, part.ranks)
    report.write_bytes(b" " * _ROOM)
    about: dict[str, Any] = {"token": part.token}
    try:
        write_safetensors(path, part.tensors, {})
        flush(path)
        about |= {"bytes": path.stat().st_size, "sha256": sha256_of(path), "boxes": part.boxes}
        _overwrite(report, about)
    except OSError as error:
        _overwrite(report, {"token": part.token, "error": str(error)[: _ROOM // 2]})
        raise
    return report


def await_parts(read: Callable[[str], bytes | None], part: Part) -> dict[str, dict[str, Any]]:
    """Return what all ranks report of their files, by file.

    Args:
        read: returns the content of a report by its name, None if there is none yet.
        part: of rank 0.

    Raises:
        OSError: a rank could not write its part, or has not done so for half an hour.
    """
    found: dict[str, dict[str, Any]] = {}
    begin, pause_s = time.monotonic(), _POLL_S
    for rank in range(part.ranks):
        while (about := _parsed(read(report_of(rank, part.ranks)), part.token)) is None:
            if time.monotonic() - begin > _PATIENCE_S:
                raise OSError(f"rank {rank} has not written its part in {_PATIENCE_S / 60:.0f} minutes")
            time.sleep(pause_s)
            pause_s = min(1.0, 1.5 * pause_s)  # each look is a request, if the store is remote
        if "error" in about:
            raise OSError(f"rank {rank}: {about['error']}")
        found[file_of(rank, part.ranks)] = about
    return found


def _parsed(content: bytes | None, token: int) -> dict[str, Any] | None:
    try:
        about: dict[str, Any] = json.loads(content or b"")
    except ValueError:  # not there, or being written
        return None
    return about if about.get("token") == token else None


def _overwrite(report: Path, about: Mapping[str, Any]) -> None:
    """Write in place: the bytes that were reserved are still ours on a full disk."""
    with report.open("r+b") as file:
        file.write(json.dumps(about).encode())
        file.truncate()
        os.fsync(file.fileno())  # not by its name: rank 0 has read the report, and may have published the checkpoint
