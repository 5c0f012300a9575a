"""A capsule's folder: its contents, and how it is read without running code from it.

step=180-rank=1/
    step.pt               the microbatches of this rank's step, each with the random states before it and its loss; the loss
                          scale: tensors and plain values only
    weights.safetensors   weights and buffers at the step's beginning, if they were still available
    manifest.json         a readable description; sizes and SHA-256 of the other files; written last
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.format import find_aliases, sha256_of, write_safetensors
from trainkit.errors import CheckpointError

STEP, WEIGHTS, MANIFEST = "step.pt", "weights.safetensors", "manifest.json"
FOLDER = "capsules"  # in the run's folder


@dataclass(frozen=True)
class Capsule:
    """A capsule that was read.

    Attributes:
        folder: its path.
        about: the manifest.
        step: the content of step.pt.
    """

    folder: Path
    about: dict[str, Any]
    step: dict[str, Any]

    @property
    def weights(self) -> Path | None:
        """The file of the step's own weights, or None."""
        return self.folder / WEIGHTS if WEIGHTS in self.about["files"] else None


def write(folder: Path, about: Mapping[str, Any], step: Mapping[str, Any], weights: Mapping[str, Tensor] | None) -> None:
    """Write a capsule, as a whole or not at all; replaces one of the same name.

    Raises:
        OSError: the write failed.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        try:
            torch.save(dict(step), draft / STEP)
        except RuntimeError as error:  # torch's writer raises it on a full disk
            raise OSError(f"{STEP}: {error}") from error
        if weights is not None:
            write_safetensors(draft / WEIGHTS, *find_aliases(weights))
        files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(draft.iterdir())}
        (draft / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def read(path: str | Path) -> Capsule:
    """Read a capsule, after comparing sizes and hashes.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(_missing(folder))
    try:
        about = json.loads((folder / MANIFEST).read_text())
        files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in about["files"].items()}
        missing = {"step", "epoch", "rank", "world_size", "settings", "num_samples"} - about.keys()
        if missing or STEP not in files:
            raise ValueError(f"it lacks {', '.join(sorted(missing)) or STEP}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no whole capsule: its {MANIFEST} cannot be read ({error}).") from error
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing. Copy the whole folder again.")
        if file.stat().st_size != size or sha256_of(file) != digest:
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written. Copy the whole folder again.")
    return Capsule(folder, about, _load(folder / STEP))


def _load(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")  # validation is wanted
            step: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is refused: it holds more than tensors and plain values ({reason}).") from error
    return step


def _missing(folder: Path) -> str:
    """Describe the fault of a path, and list capsules near it."""
    what = f"capsule is '{folder}', and there is no such folder" if not folder.exists() else f"'{folder}' is no capsule"
    near = sorted({path.parent for pattern in (f"*/{MANIFEST}", f"{FOLDER}/*/{MANIFEST}") for path in folder.glob(pattern)})
    if not near:
        near = sorted({path.parent for path in folder.parent.glob(f"*/{MANIFEST}")})
    near = [path for path in near if path.name.startswith("step=")]
    if near:
        return f"{what}. There are {', '.join(map(str, near[:8]))}{', ...' * (len(near) > 8)}."
    return f"{what}. Capsules are folders <run_dir>/{FOLDER}/step=N-rank=R, which callbacks=capsule writes; give one of them."
