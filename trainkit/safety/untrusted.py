"""Names and sizes that a file from elsewhere claims,
checked before anything is opened or allocated.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError

MOST_OF_MANIFEST = 64 << 20  # bytes


def check_name(folder: Path, name: object) -> Path:
    """Return the path of a plain file directly in a folder.

    Raises:
        CheckpointError: the name leads elsewhere, is no name, or is that of a link or a device.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or not name.isprintable()
        or {"/", "\\"} & set(name)
    ):
        raise CheckpointError(
            f"{folder} is refused: {printable(name)} is no name of a file inside it."
        )
    path = folder / name
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"{folder} is refused: {name} is a link or no plain file.")
    return path


def check_file(folder: Path, name: object, about: Mapping[str, Any]) -> Path:
    """Return the path of a described file whose size is as described, or that is missing.

    Raises:
        CheckpointError: see check_name; or the description is none.
    """
    path = check_name(folder, name)
    size = about.get("bytes") if isinstance(about, Mapping) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise CheckpointError(
            f"{folder} is refused: the size of {name} is given as {printable(size)}."
        )
    return path


def read_bounded(path: Path) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or no plain file.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_OF_MANIFEST:
        raise ValueError(f"it is no plain file, or larger than {MOST_OF_MANIFEST >> 20} MiB")
    return path.read_bytes()


def check_archive(path: Path) -> None:
    """Check a file of torch.save before torch allocates what its records claim; a file that is no
    zip archive passes.

    Raises:
        CheckpointError: it is a link or no plain file, or its records claim far more bytes than it
            has. (torch.save does not compress them, TorchScript compresses code.)
    """
    check_name(path.parent, path.name)
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(record.file_size for record in archive.infolist())
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return  # torch's own error follows
    size = path.stat().st_size
    if claimed > size + MOST_OF_MANIFEST:
        raise CheckpointError(
            f"{path} is refused: its records claim {claimed:,} bytes, and the file has {size:,}."
        )


def printable(value: object) -> str:
    """Return a value as text for a terminal: no control characters, and not endless."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
