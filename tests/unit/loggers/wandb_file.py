"""Reads the file of an offline W&B run: records of wandb's own protocol, in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEAD = struct.Struct("<IHB")  # checksum, length, kind: whole, first, middle, last


def records(folder: Path) -> list[Any]:
    """Return the records of the one offline run in `<folder>/wandb`."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    found, part, place = [], b"", 7
    while place + _HEAD.size <= len(content):
        if _BLOCK - place % _BLOCK < _HEAD.size:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        part += content[place : place + length]
        place += length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def of_kind(folder: Path, kind: str) -> list[Any]:
    """Return the records of a kind: "run", "history", "exit", ..."""
    return [getattr(record, kind) for record in records(folder) if record.WhichOneof("record_type") == kind]


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that were logged."""
    return [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in of_kind(folder, "history")]
