"""Pieces of tensors in a checkpoint of ranks that held parts of the weights (engine=fsdp), and how
any rank reads them.

    rank-0-of-2.safetensors   the pieces that rank 0 held: "model/<name>" of the weights, "training/optimizers/..." of the rest
    manifest.json             "pieces": for each tensor its shape, dtype, and the box in each file: where it begins, its size

In training.pt a reference stands for a tensor that is in pieces. A rank fills what it holds of a
tensor, a box of its own, from the boxes that overlap it, so that no rank reads more than it needs;
a whole tensor is the box of all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit.engine.pieces import Piece
from trainkit.errors import CheckpointError

MODEL = "model/"
TRAINING_KEYS = "training/"
_REFERENCE = "__piece__"  # the one key of a mapping that stands for a tensor
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class Box(NamedTuple):
    """A part of a tensor in a file, and its key there."""

    file: str
    key: str
    at: tuple[int, ...]
    size: tuple[int, ...]


def split_tree(
    tree: Any, is_split: Callable[[str, Tensor], bool], place: str = TRAINING_KEYS
) -> tuple[Any, dict[str, Tensor]]:
    """Return a tree with references in place of the tensors that ranks hold parts of,
    and those tensors by their keys.
    """
    if isinstance(tree, Tensor):
        key = place.rstrip("/")
        return ({_REFERENCE: key}, {key: tree}) if is_split(key, tree) else (tree, {})
    tensors: dict[str, Tensor] = {}
    if isinstance(tree, Mapping):
        items = {key: split_tree(value, is_split, f"{place}{key}/") for key, value in tree.items()}
        for _, inner in items.values():
            tensors |= inner
        return (
            ({key: value for key, (value, _) in items.items()}, tensors) if tensors else (tree, {})
        )
    if type(tree) in (list, tuple):
        parts = [split_tree(value, is_split, f"{place}{i}/") for i, value in enumerate(tree)]
        for _, inner in parts:
            tensors |= inner
        return (type(tree)(value for value, _ in parts), tensors) if tensors else (tree, {})
    return tree, {}


def resolve(tree: Any, read: Callable[[str], Any]) -> Any:
    """Return a tree with `read(key)` in place of each reference."""
    if isinstance(tree, dict):
        if set(tree) == {_REFERENCE}:
            return read(str(tree[_REFERENCE]))
        return {key: resolve(value, read) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(resolve(value, read) for value in tree)
    return tree


class Pieces:
    """The tensors of a checkpoint's folder that are in pieces; files stay open until this object is
    dropped.

    Raises:
        CheckpointError: the manifest's table is not one, or its boxes do not add up to its tensors.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder, self._open = folder, dict[str, Any]()
        self.aliases: dict[str, str] = {}
        self._entries: dict[str, tuple[tuple[int, ...], torch.dtype, list[Box]]] = {}
        try:
            self.aliases = {str(a): str(b) for a, b in manifest.get("aliases", {}).items()}
            for key, entry in manifest["pieces"].items():
                self._entries[key] = _entry(key, entry, manifest["files"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} is refused: its table of pieces is damaged ({error})."
            ) from error

    @classmethod
    def of_file(cls, path: Path) -> Pieces:
        """Return the weights of a file of whole tensors.

        Raises:
            CheckpointError: it cannot be read.
        """
        pieces = cls(path.parent, {"pieces": {}, "files": {}})
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            pieces._open[path.name] = file
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            pieces.aliases = {str(alias): str(name) for alias, name in aliases.items()}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                held = file.get_slice(name)
                shape = tuple(held.get_shape())
                dtype = (held[0:0] if shape else file.get_tensor(name)).dtype
                pieces._entries[MODEL + name] = (
                    shape,
                    dtype,
                    [Box(path.name, name, (0,) * len(shape), shape)],
                )
        except (OSError, SafetensorError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no safetensors file, or a damaged one ({error})."
            ) from error
        return pieces

    def names(self, prefix: str = MODEL) -> Iterator[str]:
        """Yield the keys that begin with a prefix, without it; further names of a tensor too."""
        yield from (key.removeprefix(prefix) for key in self._entries if key.startswith(prefix))
        if prefix == MODEL:
            yield from self.aliases

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def stored(self, key: str) -> StoredPieces:
        """Return a tensor, to be read later.

        Raises:
            CheckpointError: there is none of this key.
        """
        if key not in self._entries:
            raise CheckpointError(
                f"{self._folder} is refused: it refers to '{key}', which is not in its table of"
                " pieces."
            )
        return StoredPieces(self, key)

    def stored_weights(self) -> dict[str, StoredPieces]:
        """Return all weights under all their names, to be read later.

        Raises:
            CheckpointError: a further name is that of no tensor.
        """
        return {name: self.stored(MODEL + self.aliases.get(name, name)) for name in self.names()}

    def whole(self, key: str) -> Tensor:
        """Return a whole tensor, on the CPU."""
        return self.stored(key).whole()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights, whole, under all their names."""
        by_name = {
            name: self.whole(MODEL + name) for name in self.names() if name not in self.aliases
        }
        return by_name | {alias: by_name[name] for alias, name in self.aliases.items()}

    def fill(self, key: str, piece: Piece) -> None:
        """Fill a rank's part of a tensor from the boxes that overlap it.

        Raises:
            CheckpointError: a file cannot be read, or does not hold what the table says.
        """
        with torch.no_grad():
            for box in self._entries[key][2]:
                overlap = _overlap(piece, box)
                if overlap is not None:
                    ours, theirs = overlap
                    piece.local[ours].copy_(self._read(key, box, theirs))

    def _read(self, key: str, box: Box, part: tuple[slice, ...]) -> Tensor:
        try:
            if box.file not in self._open:
                self._open[box.file] = safe_open(
                    self._folder / box.file, framework="pt", device="cpu"
                )
            held = self._open[box.file].get_slice(box.key)
            if tuple(held.get_shape()) != box.size:
                raise ValueError(f"it has the shape {held.get_shape()} there, not {list(box.size)}")
            values: Tensor = held[part] if part else self._open[box.file].get_tensor(box.key)
            return values
        except (OSError, SafetensorError, ValueError, LookupError) as error:
            raise CheckpointError(
                f"{self._folder} is damaged: '{key}' cannot be read from {box.file} ({error})."
            ) from error


def _overlap(piece: Piece, box: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return what a part of a tensor and a box share, as slices of each; None if it is nothing."""
    ours: list[slice] = []
    theirs: list[slice] = []
    extents = zip(piece.at, piece.local.shape, box.at, box.size, strict=True)
    for start, length, box_start, box_length in extents:
        low = max(start, box_start)
        high = min(start + length, box_start + box_length)
        if low >= high:
            return None
        ours.append(slice(low - start, high - start))
        theirs.append(slice(low - box_start, high - box_start))
    return tuple(ours), tuple(theirs)


class StoredPieces:
    """A tensor in pieces."""

    def __init__(self, pieces: Pieces, key: str) -> None:
        self._pieces = pieces
        self._key = key
        self.shape, self.dtype, _ = pieces._entries[key]

    def into(self, piece: Piece) -> None:
        """Fill a rank's part of a tensor of this shape."""
        self._pieces.fill(self._key, piece)

    def whole(self) -> Tensor:
        """Return all of it, on the CPU."""
        tensor = torch.zeros(self.shape, dtype=self.dtype)
        self.into(Piece(tensor, (0,) * len(self.shape), self.shape, True))
        return tensor


def table_of(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest's table: for each key its shape, dtype and boxes,
    from what each rank reports of its file. A box that several ranks hold (of a weight that pipeline
    stages share) is read from the first one's.
    """
    table: dict[str, Any] = {}
    for file, boxes in files.items():
        for key, (shape, dtype, at, size) in boxes.items():
            entry = table.setdefault(key, {"shape": list(shape), "dtype": dtype, "boxes": []})
            if not any(box[1:] == [list(at), list(size)] for box in entry["boxes"]):
                entry["boxes"].append([file, list(at), list(size)])
    return table


def _entry(
    key: str, entry: Any, files: Mapping[str, Any]
) -> tuple[tuple[int, ...], torch.dtype, list[Box]]:
    shape, dtype = _sizes(entry["shape"]), _DTYPES[entry["dtype"]]
    boxes = [Box(str(file), key, _sizes(at), _sizes(size)) for file, at, size in entry["boxes"]]
    for box in boxes:
        if box.file not in files:
            raise ValueError(f"{box.file} is none of its files")
        if not len(box.at) == len(box.size) == len(shape):
            raise ValueError("a box has other dimensions than its tensor")
        if any(a + n > whole for a, n, whole in zip(box.at, box.size, shape, strict=True)):
            raise ValueError("a box reaches beyond its tensor")
    held = sum(math.prod(box.size) for box in boxes)
    # an allocation that no file could fill
    most = sum(int(about["bytes"]) for about in files.values())
    if held != math.prod(shape) or held > most:
        raise ValueError(f"its boxes hold {held} of {math.prod(shape)} elements")
    return shape, dtype, boxes


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in sizes):
        raise ValueError(f"{values} are no sizes")
    return sizes
