"""Parts of a checkpoint: the files that ranks write side by side, if each holds a part of the
weights.

each rank's thread    its pieces -> rank-R-of-N.safetensors -> a report: size, hash, boxes, or the error
rank 0's thread       the same -> waits for all reports -> training.pt, manifest.json, which makes them one checkpoint

A report is no collective, which could overtake one of training, and no file, which a rank with a
full disk could not write: it is left for rank 0 in the group's store (Collectives.leave).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainkit.checkpoint.files import flush, sha256_of, write_safetensors

_FILE = re.compile(r"rank-\d+-of-\d+\.safetensors")
_POLL_S = 0.05
_LONGEST_POLL_S = 0.5
_PATIENCE_S = 1800.0
_SEEN_S = 60.0  # a network disk may show another host's file late


class RankFile(NamedTuple):
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


def is_file_of_rank(name: str) -> bool:
    """Return whether a name is that of a rank's file."""
    return _FILE.fullmatch(name) is not None


def report(part: RankFile, about: Mapping[str, Any], leave: Callable[[str, bytes], None]) -> None:
    """Leave for rank 0 what `write_part` returned, or {"error": why it failed}."""
    leave(_key_of(part.token, part.rank), json.dumps(about).encode())


def write_part(folder: Path, part: RankFile) -> dict[str, Any]:
    """Write a rank's file into a folder; return its report.

    Raises:
        OSError: the write failed.
    """
    path = folder / file_of(part.rank, part.ranks)
    write_safetensors(path, part.tensors, {})
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path), "boxes": part.boxes}


def await_parts(
    take: Callable[[str], bytes | None], size_of: Callable[[str], int | None], part: RankFile
) -> dict[str, dict[str, Any]]:
    """Return what all ranks report of their files, by file.

    All reports are taken before a failure is raised: none stays in the group's store, and no rank
    writes any more.

    Args:
        take: returns what was left for rank 0 under a key, None if there is nothing yet.
        size_of: returns the size of a rank's file in bytes as rank 0 sees it, None if it does not.
        part: of rank 0.

    Raises:
        OSError: a rank could not write its part, or has not done so for half an hour; or rank 0
            does not see it.
    """
    reports: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    end = time.monotonic() + _PATIENCE_S
    for rank in range(part.ranks):
        content = _poll(lambda rank=rank: take(_key_of(part.token, rank)), end)  # type: ignore[misc]
        if content is None:
            raise OSError(f"rank {rank} has not written its part in {_PATIENCE_S / 60:.0f} minutes")
        reports[file_of(rank, part.ranks)] = about = json.loads(content)
        failures += [f"rank {rank}: {about['error']}"] if "error" in about else []
    if failures:
        raise OSError(
            failures[0]
            + (f" (and {len(failures) - 1} more of {part.ranks} ranks)" if failures[1:] else "")
        )
    end = time.monotonic() + _SEEN_S
    for rank, (file, about) in enumerate(reports.items()):
        if _poll(lambda file=file, size=about["bytes"]: size_of(file) == size or None, end) is None:  # type: ignore[misc]
            raise OSError(
                f"rank {rank} has written {file} ({about['bytes']} bytes), and rank 0 does not see"
                f" it after {_SEEN_S:g} s. The run's folder must be on storage that all hosts"
                " share, or the checkpoints at a URL (ModelCheckpoint.dirpath)"
            )
    return reports


def _poll(look: Callable[[], Any], end: float) -> Any:
    """Return what `look` returns once that is not None; None after `end`."""
    pause_s = _POLL_S
    while (seen := look()) is None and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(_LONGEST_POLL_S, 1.5 * pause_s)  # each look is a request
    return seen


def _key_of(token: int, rank: int) -> str:
    return f"checkpoint-{token}/{rank}"
