"""Which checkpoint is meant, and is it whole: "last", "best", "auto", a folder or a URL.

`last` and `auto` take the newest that is whole: a damaged one is named, and the one before it is taken. What was asked
for by its own name, or as the best, is taken or refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trainkit.checkpoint.format import MANIFEST, TRAINING, load_training, load_weights, read_manifest, verify
from trainkit.checkpoint.store import Store, make_store
from trainkit.errors import CheckpointError

OTHER = "Take another one: ckpt_path=PATH."


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose weights are in the model.

    Attributes:
        path: where it lies.
        training: what was saved beside the weights, where it was asked for.
    """

    path: str
    training: dict[str, Any] | None


def load(
    ckpt_path: str, stores: Sequence[Store], model: nn.Module, resume: bool, tell: Callable[[str], None] = print
) -> Loaded | None:
    """Find a checkpoint, verify it, and load its weights into the model.

    Args:
        ckpt_path: "last" or "best" of the stores, "auto" (the last one, if there is any), a folder, or a URL.
        stores: where this run's checkpoints lie.
        model: gets the weights.
        resume: whether a run is to go on from it: those with weights alone do not count, and `training` is read.
        tell: is called with a sentence for each that is damaged and passed over.

    Returns:
        None for "auto" where there are no checkpoints.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit.
    """
    try:
        with _find(ckpt_path, stores, resume, tell) as found:
            if found is None:
                return None
            path, folder = found
            training = load_training(folder) if resume else None
            load_weights(folder, model)
            return Loaded(path, training)
    except OSError as error:
        raise CheckpointError(f"ckpt_path is '{ckpt_path}', which cannot be read: {type(error).__name__}: {error}.") from error


@contextmanager
def _find(
    ckpt_path: str, stores: Sequence[Store], resume: bool, tell: Callable[[str], None]
) -> Iterator[tuple[str, Path] | None]:
    with ExitStack() as stack:
        if ckpt_path in ("last", "auto"):
            yield _newest(stores, resume, tell, stack, ckpt_path == "auto")
            return
        store, name = _best(stores) if ckpt_path == "best" else _named(ckpt_path)
        folder = stack.enter_context(store.fetch(name))
        try:
            verify(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {OTHER}") from error
        yield store.path_of(name), folder


def _newest(
    stores: Sequence[Store], resume: bool, tell: Callable[[str], None], stack: ExitStack, or_none: bool
) -> tuple[str, Path] | None:
    """Return the newest checkpoint that is whole, as (where it lies, its folder on this machine); None where none counts."""
    there = [(written(store, name), store, name) for store in stores for name in store.names()]
    weights_alone, damaged = "", False
    for _, store, name in sorted(there, key=lambda entry: entry[0], reverse=True):
        folder = stack.enter_context(store.fetch(name))
        try:
            manifest = verify(folder)
        except CheckpointError as error:
            tell(f"{error} The one before it is taken.")
            damaged = True
            continue
        if resume and TRAINING not in manifest["files"]:
            weights_alone = store.path_of(name)
            continue
        return store.path_of(name), folder
    if or_none and not damaged:
        if weights_alone:
            tell(f"{weights_alone} holds weights alone: nothing to go on from, the run begins anew.")
        return None
    if weights_alone:
        raise CheckpointError(
            f"{weights_alone} holds weights alone: a run cannot go on from it. It can be validated and tested, and a new run "
            f"can start from its weights: init_weights={weights_alone}"
        )
    raise CheckpointError(_nothing("last", stores))


def written(store: Store, name: str) -> str:
    """Return when a checkpoint was written, so that text order is time's order; the latest of all where nobody can read it."""
    with store.fetch(name, manifest_alone=True) as folder:
        try:
            return str(read_manifest(folder)["written"])
        except (CheckpointError, KeyError):
            return "unknown"  # behind all digits: tried first, and so told of


def _best(stores: Sequence[Store]) -> tuple[Store, str]:
    for store in stores:
        name = store.target("best")
        if name is not None:
            return store, name
    raise CheckpointError(_nothing("best", stores))


def _named(ckpt_path: str) -> tuple[Store, str]:
    if "://" in ckpt_path:
        place, _, name = ckpt_path.rstrip("/").rpartition("/")
        store = make_store(place)
        return store, store.target(name) or name if name in ("last", "best") else name
    path = Path(ckpt_path)
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"ckpt_path is '{ckpt_path}'; it must be 'last', 'best', or the folder of a checkpoint (it holds a {MANIFEST})."
        )
    path = Path(os.path.realpath(path))
    return make_store(path.parent), path.name


def _nothing(wish: str, stores: Sequence[Store]) -> str:
    there = sorted(name for store in stores for name in store.names())
    found = f"there are {', '.join(there)}" if there else "there are no checkpoints there"
    hint = "" if there else _newest_run_hint(Path(stores[-1].place).parent)
    return f"ckpt_path is '{wish}', and {stores[0].place} has no '{wish}' that is whole; {found}.{hint}"


def _newest_run_hint(run_dir: Path) -> str:
    runs = [p.parent.parent for p in run_dir.parent.glob("*/checkpoints/last")] if run_dir.parent.is_dir() else []
    if not runs:
        return " Give the run's folder: run_dir=..."
    return f" The newest run with checkpoints is run_dir={max(runs, key=lambda p: p.stat().st_mtime)}"
