"""A checkpoint's folder: its contents, its hashes, and how it is read without running code from it.

    epoch=3-step=180/
        weights.safetensors   the model; a tensor with several names is stored once (metadata "aliases"). If each rank holds a
                              part of the weights: a file for each rank in its place (pieces.py)
        training.pt           optimizers, schedules, counters, random states, callbacks: tensors and plain values only
        manifest.json         a readable description; sizes and SHA-256 of all files, its own too; written last

`write` writes the files into an existing folder, `verify` finds every changed bit. store.py places
folders and makes them appear as a whole or not at all; find.py selects one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainkit.checkpoint.files import check_files, describe_file, flush, write_safetensors
from trainkit.checkpoint.mismatch import mismatches, under_names_of, unfit
from trainkit.checkpoint.parts import RankFile
from trainkit.checkpoint.pieces import Pieces, resolve, table_of
from trainkit.errors import CheckpointError
from trainkit.safety.untrusted import check_archive, read_bounded

WEIGHTS = "weights.safetensors"
TRAINING = "training.pt"
MANIFEST = "manifest.json"
ONLY_WEIGHTS = "holds only weights: a run cannot resume from it. It can be validated and tested."
# Raised by torch.load and the unpicklers for a damaged or foreign file.
STRANGE_FILE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    struct.error,
)
# the manifest's own hash is that of itself with no seal
_SEAL = "sha256_of_this_file"
_NO_SEAL = "0" * 64


def now() -> str:
    """Return the time as text that sorts by time."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, on the host.

    Attributes:
        weights: name -> tensor, each tensor once; none if they are in parts.
        aliases: further name -> the name under which its tensor is stored.
        training: tensors and plain values, or None for weights only.
        about: plain values for the manifest.
        part: what this rank writes of weights and training of which each rank holds a part; None if
            this rank holds all.
        written: when; of a run's checkpoints each is later than those before (find.later).
    """

    weights: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    training: Mapping[str, Any] | None
    about: Mapping[str, Any]
    part: RankFile | None = None
    written: str = field(default_factory=now)


def write(
    folder: Path, snapshot: Snapshot, parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> None:
    """Write a checkpoint's files into a folder, the manifest last, each on disk before this
    returns.

    Args:
        parts: what the ranks report of the files that they have written, if the snapshot has a
            part; see parts.await_parts.

    Raises:
        OSError: the write failed.
    """
    files: dict[str, dict[str, Any]] = {}
    if snapshot.part is None:
        write_safetensors(folder / WEIGHTS, snapshot.weights, snapshot.aliases)
        files[WEIGHTS] = describe_file(folder / WEIGHTS)
    if snapshot.training is not None:
        save_plain(snapshot.training, folder / TRAINING)
        files[TRAINING] = describe_file(folder / TRAINING)
    about = dict(snapshot.about)
    if snapshot.part is not None:
        about |= {
            "aliases": dict(snapshot.aliases),
            "pieces": table_of({name: part["boxes"] for name, part in parts.items()}),
        }
    written = files | {
        name: {"bytes": part["bytes"], "sha256": part["sha256"]} for name, part in parts.items()
    }
    about |= {"written": snapshot.written, "files": written, _SEAL: _NO_SEAL}
    text = (json.dumps(about, indent=None if parts else 2) + "\n").encode()
    (folder / MANIFEST).write_bytes(_with_seal(text, _digest(text)))
    for path in [*(folder / name for name in files), folder / MANIFEST, folder]:
        flush(path)


def find_aliases(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a state_dict into its tensors, each once,
    and the further names of those that have several.
    """
    names: dict[Any, str] = {}
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = names.setdefault(place, name) if tensor.numel() else name
        if first == name:
            weights[name] = tensor
        else:
            aliases[name] = first
    return weights, aliases


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest, its own seal checked.

    Raises:
        CheckpointError: it is missing, cannot be read, or is not what was written.
    """
    try:
        text = read_bounded(folder / MANIFEST)
        manifest: dict[str, Any] = json.loads(text)
        if _SEAL not in manifest:
            raise ValueError(f"it has no {_SEAL}")
        seal = str(manifest[_SEAL])
        whole = text == _with_seal(text, seal) and seal == _digest(_with_seal(text, _NO_SEAL))
        if WEIGHTS not in manifest["files"] and "pieces" not in manifest:
            raise KeyError(WEIGHTS)
        if any(set(about) != {"bytes", "sha256"} for about in manifest["files"].values()):
            raise ValueError("its files are not given by bytes and sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is no whole checkpoint: its {MANIFEST} cannot be read ({error})."
        ) from error
    if not whole:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} is not what was written.")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest after comparing sizes and hashes.

    Raises:
        CheckpointError: the folder is no checkpoint, or a file is missing or damaged.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"])
    return manifest


def read_state(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's weights under all their names, whole, on the CPU;
    see `read_safetensors`.
    """
    pieces = open_pieces(folder)
    return read_safetensors(folder / WEIGHTS) if pieces is None else pieces.weights()


def open_weights(folder: Path) -> Pieces:
    """Return a checkpoint's weights, whole or in pieces, to be read later.

    Raises:
        CheckpointError: they cannot be read.
    """
    return open_pieces(folder) or Pieces.of_file(folder / WEIGHTS)


def open_pieces(folder: Path) -> Pieces | None:
    """Return the table of a checkpoint with weights in pieces; None if its weights are whole."""
    if (folder / WEIGHTS).is_file() or not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    return Pieces(folder, manifest) if "pieces" in manifest else None


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file under all their names, those in its metadata's "aliases" too, on
    the CPU.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        return state | {alias: state[name] for alias, name in aliases.items()}
    except (OSError, SafetensorError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise CheckpointError(
            f"{path} is no safetensors file, or a damaged one ({type(error).__name__}: {reason})."
        ) from error


def load_weights(folder: Path, model: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
    """Load all weights into the model: those of `state` if it is given, which come from the folder.

    Raises:
        CheckpointError: they do not fit this model.
    """
    state = read_state(folder) if state is None else state
    state = under_names_of(model.state_dict(), state)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        here = {
            name: tensor.shape
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, Tensor)
        }
        lines = mismatches({name: tensor.shape for name, tensor in state.items()}, here)
        raise unfit(folder, lines or str(error).splitlines()) from None  # torch lists every name


def load_training(folder: Path, mapped: bool = False) -> dict[str, Any]:
    """Return the state saved beside the weights, whole, on the CPU.

    Args:
        mapped: read tensors when they are used; a StoredPieces is in the place of each that is in
            pieces.

    Raises:
        CheckpointError: there is none (only weights), or the file would run code.
    """
    path = folder / TRAINING
    if not path.is_file():
        raise CheckpointError(f"{folder} {ONLY_WEIGHTS}")
    pieces, content = open_pieces(folder), load_plain(path, mapped)
    if pieces is None:
        return content
    resolved: dict[str, Any] = resolve(content, pieces.stored if mapped else pieces.whole)
    return resolved


def load_extra(folder: Path) -> dict[str, Any]:
    """Return {"extra": what on_save_checkpoint left, "state": the counters} and, of a DataModule with
    a state, "datamodule", whole, on the CPU, without the rest of what is saved beside the weights; {}
    of a checkpoint that holds only weights.

    Raises:
        CheckpointError: the file would run code.
    """
    if not (folder / TRAINING).is_file():
        return {}
    pieces, training = open_pieces(folder), load_plain(folder / TRAINING, mapped=True)
    wanted = training.keys() & {"extra", "state", "datamodule"}
    left = {name: training[name] for name in sorted(wanted)}
    return left if pieces is None else dict(resolve(left, pieces.whole))


def save_plain(content: Mapping[str, Any], path: Path) -> None:
    """Write tensors and plain values.

    Raises:
        OSError: the write failed.
    """
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch's writer raises it on a full disk
        raise OSError(f"{path.name}: {error}") from error


def load_plain(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Return the tensors and plain values of a file, on the CPU; `mapped` tensors are read from the
    file when they are used.

    Raises:
        CheckpointError: the file would run code, or claims far more bytes than it has.
    """
    check_archive(path)
    try:
        with warnings.catch_warnings():
            # validation is wanted
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            content: dict[str, Any] = torch.load(
                path,
                map_location="cpu",
                weights_only=True,
                mmap=mapped and zipfile.is_zipfile(path),
            )
    except STRANGE_FILE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values ({reason})."
        ) from error
    return content


def _with_seal(text: bytes, seal: str) -> bytes:
    """Replace the text's seal, which is the last entry."""
    sealed = f'"{_SEAL}": "{seal}"'.encode()
    at = text.rfind(f'"{_SEAL}": "'.encode())
    return text[:at] + sealed + text[at + len(sealed) :]


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
