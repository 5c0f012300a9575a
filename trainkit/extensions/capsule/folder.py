"""A capsule's folder: its contents, and how it is read without running code from it.

step=180-rank=1/
    step.pt               the microbatches of this rank's step, each with the random states before it and its loss; the loss
                          scale: tensors and plain values only
    weights.safetensors   weights and buffers at the step's beginning if they were still available, else those that training
                          started from if there was no checkpoint
    manifest.json         a readable description; sizes and SHA-256 of the other files; written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint.files import check_files, describe_file, write_safetensors
from trainkit.checkpoint.format import MANIFEST, WEIGHTS, find_aliases, load_plain, save_plain
from trainkit.errors import CheckpointError
from trainkit.safety.untrusted import printable, read_bounded

STEP = "step.pt"
FOLDER = "capsules"  # in the run's folder
_STEPS = 1 << 48
_SAMPLES = 1 << 32
_RANKS = 1 << 24
_LIMITS = {
    **dict.fromkeys(("step", "epoch", "step_in_epoch", "total_steps", "weights_step"), _STEPS),
    "num_samples": _SAMPLES,  # of one step
    **dict.fromkeys(("rank", "world_size"), _RANKS),
}


@dataclass(frozen=True)
class Capsule:
    """A capsule that was read: its path, its manifest, the content of step.pt."""

    folder: Path
    about: dict[str, Any]
    step: dict[str, Any]

    @property
    def weights(self) -> Path | None:
        """The file of weights, or None."""
        return self.folder / WEIGHTS if WEIGHTS in self.about["files"] else None

    @property
    def weights_age(self) -> int:
        """By how many steps these weights are older than the step."""
        step = self.about["step"]
        of_step = self.about.get("weights_step")
        return 0 if of_step is None else int(step) - int(of_step)


def write(
    folder: Path,
    about: Mapping[str, Any],
    step: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None,
) -> None:
    """Write a capsule, as a whole or not at all; replaces one of the same name.

    Raises:
        OSError: the write failed.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        save_plain(dict(step), draft / STEP)
        if weights is not None:
            write_safetensors(draft / WEIGHTS, *find_aliases(weights))
        files = {path.name: describe_file(path) for path in sorted(draft.iterdir())}
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
        about = json.loads(read_bounded(folder / MANIFEST))
        files = {
            str(name): {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
            for name, file in about["files"].items()
        }
        missing = {"step", "epoch", "rank", "world_size", "settings", "num_samples"} - about.keys()
        if missing or STEP not in files:
            raise ValueError(f"it lacks {', '.join(sorted(missing)) or STEP}")
        _check_numbers(about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is no whole capsule: its {MANIFEST} cannot be read ({error})."
        ) from error
    check_files(folder, files, " Copy the whole folder again.")
    return Capsule(folder, about, load_plain(folder / STEP))


def _check_numbers(about: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that no run has: a replay counts with them."""
    for name, limit in _LIMITS.items():
        number = about.get(name, 0)
        is_open = number is None and name in ("num_samples", "total_steps", "weights_step")
        if not is_open and (type(number) is not int or not 0 <= number <= limit):
            raise ValueError(
                f"{name} is {printable(number)}; it must be a whole number, {limit:,} at most"
            )


def _missing(folder: Path) -> str:
    """Describe the fault of a path, and list capsules near it."""
    what = (
        f"capsule is '{folder}', and there is no such folder"
        if not folder.exists()
        else f"'{folder}' is no capsule"
    )
    near = sorted(
        {
            path.parent
            for pattern in (f"*/{MANIFEST}", f"{FOLDER}/*/{MANIFEST}")
            for path in folder.glob(pattern)
        }
    )
    if not near:
        near = sorted({path.parent for path in folder.parent.glob(f"*/{MANIFEST}")})
    near = [path for path in near if path.name.startswith("step=")]
    if near:
        return f"{what}. There are {', '.join(map(str, near[:8]))}{', ...' * (len(near) > 8)}."
    return (
        f"{what}. Capsules are folders <run_dir>/{FOLDER}/step=N-rank=R, which callbacks=capsule"
        " writes; give one of them."
    )
