"""Reads the file of an offline W&B run:
records of wandb's own protocol, in LevelDB's log format.
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

_BLOCK = 32768
_WRITTEN_WITHIN_S = 30.0
_HEAD = struct.Struct("<IHB")  # checksum, length, kind: whole, first, middle, last


def records(folder: Path) -> list[Any]:
    """Return the records of the one offline run in `<folder>/wandb`, which has ended.

    W&B's own process writes the file, and may do so only after `finish` has returned: this waits
    for the run's last record.
    """
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        files = [*(folder / "wandb").glob("offline-run-*/run-*.wandb")]
        assert len(files) <= 1, files
        held = [record for path in files for record in _parse(path.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in held):
            return held
        assert time.monotonic() < deadline, (
            f"the run has not ended; {files} hold {len(held)} records"
        )
        time.sleep(0.01)


def _parse(content: bytes) -> list[Any]:
    """Return the complete records so far."""
    from wandb.proto import wandb_internal_pb2

    assert content[:4] in (b":W&B", b"")
    found, part, place = [], b"", 7
    while place + _HEAD.size <= len(content):
        if _BLOCK - place % _BLOCK < _HEAD.size:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        if place + length > len(content):
            break
        part += content[place : place + length]
        place += length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def of_kind(folder: Path, kind: str) -> list[Any]:
    """Return the records of a kind: "run", "history", "exit", ..."""
    return [
        getattr(record, kind)
        for record in records(folder)
        if record.WhichOneof("record_type") == kind
    ]


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that were logged."""
    return [
        {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item}
        for row in of_kind(folder, "history")
    ]
