"""A checkpoint on disk: a folder that a reader sees whole or not at all, and from which nothing is ever unpickled.

    epoch=3-step=180/
        weights.safetensors   the model
        training.pt           optimizers, schedules, counters, random states, callbacks: tensors and plain values only
        manifest.json         what this is, with sizes and SHA-256 of the others; written last

The folder is written under a name that starts with a dot and renamed when all is on disk. `last` and `best` beside it
are links to folders.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from trainkit.errors import CheckpointError

WEIGHTS, TRAINING, MANIFEST = "weights.safetensors", "training.pt", "manifest.json"


def write(folder: Path, model: nn.Module, training: dict[str, Any] | None, about: dict[str, Any]) -> None:
    """Write a checkpoint folder.

    Args:
        folder: its final place; a checkpoint that stands there is replaced, anything else is refused.
        model: whose weights are saved.
        training: tensors and plain values, or None for weights alone.
        about: plain values for the manifest.

    Raises:
        OSError: the disk does not take it; nothing is left behind.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise FileExistsError(errno.EEXIST, "it exists and is no checkpoint", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        _write_tensors(draft, model, training)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(draft.iterdir())}
        (draft / MANIFEST).write_text(json.dumps(about | {"files": files}, indent=2) + "\n")
        for path in draft.iterdir():
            _flush(path)
        aside = folder.with_name(f".{folder.name}.{os.getpid()}.before")
        if folder.exists():
            folder.rename(aside)
        draft.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_tensors(draft: Path, model: nn.Module, training: dict[str, Any] | None) -> None:
    """Write weights and training state; what their writers say of a full disk becomes an OSError."""
    try:
        safetensors.torch.save_model(model, str(draft / WEIGHTS))
    except SafetensorError as error:
        raise OSError(f"{WEIGHTS}: {error}") from error
    if training is None:
        return
    try:
        torch.save(training, draft / TRAINING)
    except RuntimeError as error:
        raise OSError(f"{TRAINING}: {error}") from error


def point(link: Path, target: Path) -> None:
    """Make `link` a relative link to the folder `target` beside it, in one move.

    A checkpoint's folder in the link's place (a run that was copied with its links followed) is a copy: it gives way.
    """
    if link.is_dir() and not link.is_symlink() and (link / MANIFEST).is_file():
        shutil.rmtree(link)
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(target, link.parent))
    draft.replace(link)


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest after comparing sizes and hashes.

    Raises:
        CheckpointError: the folder is no checkpoint, or a file is missing or damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        files = {name: (about["bytes"], about["sha256"]) for name, about in manifest["files"].items()}
        if WEIGHTS not in files:
            raise KeyError(WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no whole checkpoint: its {MANIFEST} cannot be read ({error}).") from error
    for name, (num_bytes, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing. Take another one: ckpt_path=PATH.")
        if path.stat().st_size != num_bytes or _sha256(path) != digest:
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written. Take another one: ckpt_path=PATH.")
    return manifest


def load(ckpt_path: str, run_dir: Path, model: nn.Module) -> Path:
    """Find a checkpoint, verify it, load its weights into the model, and return its folder.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit.
    """
    folder = resolve(ckpt_path, run_dir)
    verify(folder)
    load_weights(folder, model)
    return folder


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the weights into the model, all of them.

    Raises:
        CheckpointError: they do not fit this model.
    """
    try:
        safetensors.torch.load_model(model, str(folder / WEIGHTS), device="cpu")
    except (RuntimeError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        shown = "\n  ".join(lines[:6] + (["..."] if len(lines) > 6 else []))
        raise CheckpointError(f"The weights in {folder} do not fit this model:\n  {shown}") from error


def load_training(folder: Path) -> dict[str, Any]:
    """Return what was saved beside the weights, on the CPU.

    Raises:
        CheckpointError: there is none (weights alone), or the file would run code.
    """
    path = folder / TRAINING
    if not path.is_file():
        raise CheckpointError(f"{folder} holds weights alone: a run cannot go on from it. It can be validated and tested.")
    try:
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is refused: it holds more than tensors and plain values ({reason}).") from error
    return training


def resolve(ckpt_path: str, run_dir: Path) -> Path:
    """Return the checkpoint folder that `ckpt_path` means.

    Args:
        ckpt_path: "last", "best", or a path to a checkpoint's folder.
        run_dir: the run whose last or best is meant.

    Raises:
        CheckpointError: there is none.
    """
    if ckpt_path not in ("last", "best"):
        path = Path(ckpt_path)
        if not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"ckpt_path is '{ckpt_path}'; it must be 'last', 'best', or the folder of a checkpoint (it holds a {MANIFEST})."
            )
        return path
    folder = run_dir / "checkpoints"
    link = folder / ckpt_path
    if (link / MANIFEST).is_file():
        return link.resolve()
    there = sorted(p.name for p in folder.iterdir() if (p / MANIFEST).is_file()) if folder.is_dir() else []
    found = f"there are {', '.join(there)}" if there else "there are no checkpoints there"
    hint = "" if there else _newest_run_hint(run_dir)
    raise CheckpointError(f"ckpt_path is '{ckpt_path}', and {folder} has no '{ckpt_path}'; {found}.{hint}")


def _newest_run_hint(run_dir: Path) -> str:
    runs = [p.parent.parent for p in run_dir.parent.glob("*/checkpoints/last")] if run_dir.parent.is_dir() else []
    if not runs:
        return " Give the run's folder: run_dir=..."
    return f" The newest run with checkpoints is run_dir={max(runs, key=lambda p: p.stat().st_mtime)}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
