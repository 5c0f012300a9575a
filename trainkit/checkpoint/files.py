"""Files of a checkpoint: written so that they are on disk, and described by size and SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from trainkit.errors import CheckpointError
from trainkit.safety.untrusted import check_file


def write_safetensors(path: Path, state: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Write tensors, each once, and the further names of some in the metadata.

    Raises:
        OSError: the write failed.
    """
    path.touch()
    # by the user's umask; safetensors makes the file readable for its owner only
    mode = path.stat().st_mode
    try:
        whole = {name: tensor.contiguous() for name, tensor in state.items()}
        safetensors.torch.save_file(
            whole, path, {"format": "pt", "aliases": json.dumps(dict(aliases))}
        )
        path.chmod(mode)
    except SafetensorError as error:  # raised on a full disk
        raise OSError(f"{path.name}: {error}") from error


def describe_file(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]], advice: str = "") -> None:
    """Compare the files of a folder with their description.

    Raises:
        CheckpointError: one is missing, or is not what was written; ends with `advice`.
    """
    for name, about in files.items():
        path = check_file(folder, name, about)
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing.{advice}")
        if path.stat().st_size != about["bytes"] or sha256_of(path) != about["sha256"]:
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written.{advice}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
