"""Finds and verifies a checkpoint: "last", "best", "auto", a folder or a URL.

`last` and `auto` take the newest complete checkpoint: a damaged one is named, and the one before it
is taken. A checkpoint requested by name, or as the best, is loaded or raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainkit.checkpoint.format import (
    MANIFEST,
    ONLY_WEIGHTS,
    TRAINING,
    load_extra,
    load_training,
    now,
    open_weights,
    read_manifest,
    read_state,
    verify,
)
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.store import Store
from trainkit.errors import CheckpointError, NoCheckpointError, clause

OTHER = "Take another one: ckpt_path=PATH."
_INSTEAD = "Take another run's checkpoint (ckpt_path=PATH), or begin in a new folder (run_dir=...)."
_UNKNOWN = "unknown"  # sorts after all digits
Difference = Callable[[Any], str]
Say = Callable[[str], None]


def as_any(saved: Any) -> str:
    """Return "": a saved state may be anything."""
    return ""


class Loaded(NamedTuple):
    """A checkpoint that was read: its path, its weights, and the state saved beside them."""

    path: str
    weights: dict[str, Tensor]
    training: dict[str, Any]


def read(
    ckpt_path: str,
    stores: Sequence[Store],
    resume: bool,
    say: Say = print,
    difference: Difference = as_any,
) -> Loaded | None:
    """Find a checkpoint, verify it, and read it.

    Args:
        ckpt_path: "last" or "best" of the stores, "auto" (the last one, if there is any; of
            "auto:PATH" PATH if there is none), a folder, or a URL.
        stores: locations of this run's checkpoints.
        resume: whether a run resumes from it: skips checkpoints that hold only weights, and reads
            the state beside them.
        say: prints a sentence for each damaged checkpoint that is skipped.
        difference: returns by what a saved state differs from one that a run resumes from, in
            words; "" if by nothing.

    Returns:
        It, if not `resume` with at most the state of `load_extra`; None for "auto" if there is no
        checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    with _find(ckpt_path, stores, say, _Finder(resume, difference)) as checkpoint:
        if checkpoint is None:
            return None
        path, folder = checkpoint
        training = load_training(folder) if resume else load_extra(folder)
        return Loaded(path, read_state(folder), training)


def locate(
    ckpt_path: str,
    stores: Sequence[Store],
    resume: bool,
    say: Say = print,
    difference: Difference = as_any,
) -> str | None:
    """Find a checkpoint and verify it; return its path or URL. See `read`."""
    with _find(ckpt_path, stores, say, _Finder(resume, difference)) as checkpoint:
        return None if checkpoint is None else checkpoint[0]


def fetched(path: str, stores: Sequence[Store] = ()) -> AbstractContextManager[Path]:
    """Return a context that yields the folder, on this machine, of the checkpoint at a path or URL
    that `locate` returned for these stores.
    """
    for store in stores:
        if path == store.path_of(name := path.rpartition("/")[2]):
            return store.fetch(name)
    store, name = _named(path)
    return store.fetch(name)


class _Finder(NamedTuple):
    """Opens a checkpoint, and compares all that can be compared
    before its weights are loaded; see `read`.
    """

    resume: bool
    difference: Difference

    def open(self, store: Store, name: str, stack: ExitStack) -> Path | None:
        """Return a checkpoint's folder on this machine, until `stack` is closed; None to resume
        from one of only weights.

        Raises:
            CheckpointError: it is damaged, or its content is not what a run writes.
        """
        with ExitStack() as opened:
            folder = opened.enter_context(store.fetch(name))
            manifest = read_manifest(folder) if store.compares else verify(folder)
            if self.resume and TRAINING not in manifest["files"]:
                return None
            open_weights(folder).stored_weights()
            if self.resume and (difference := self.difference(load_training(folder, mapped=True))):
                raise CheckpointError(
                    f"{folder} cannot be resumed from: in its {TRAINING} {difference}."
                )
            stack.push(opened.pop_all())
            return folder


@contextmanager
def _find(
    ckpt_path: str, stores: Sequence[Store], say: Say, reader: _Finder
) -> Iterator[tuple[str, Path] | None]:
    requested, _, other = ckpt_path.partition(":")
    try:
        with ExitStack() as stack:
            if ckpt_path == "last" or requested == "auto":
                newest = _newest(stores, say, reader, stack, requested, other)
                if newest is not None or not other:
                    yield newest
                    return
                ckpt_path = other
            store, name = _best(stores) if ckpt_path == "best" else _named(ckpt_path)
            try:
                folder = reader.open(store, name, stack)
            except CheckpointError as error:
                raise CheckpointError(f"{error} {OTHER}") from error
            if folder is None:
                raise CheckpointError(f"{store.path_of(name)} {ONLY_WEIGHTS}")
            yield store.path_of(name), folder
    except OSError as error:
        raise CheckpointError(
            f"ckpt_path is '{ckpt_path}', which cannot be read: {type(error).__name__}: {clause(error)}."
        ) from error


def _newest(
    stores: Sequence[Store], say: Say, reader: _Finder, stack: ExitStack, requested: str, other: str
) -> tuple[str, Path] | None:
    """Return the newest complete checkpoint as (path or URL, its folder on this machine), or None:
    then `other` is read, if any.
    """
    weights_alone = ""
    damaged = ""
    for store, name in _in_order(stores):
        try:
            folder = reader.open(store, name, stack)
        except CheckpointError as error:
            say(f"{error} The one before it is taken.")
            damaged = damaged or f"{error} {_INSTEAD}"
            continue
        if folder is not None:
            return store.path_of(name), folder
        weights_alone = store.path_of(name)
    if requested == "auto" and not damaged:
        if weights_alone:
            then = f"the run begins at {other}" if other else "a new run starts"
            say(f"{weights_alone} holds only weights: there is nothing to resume from, {then}.")
        return None
    if weights_alone:
        raise CheckpointError(
            f"{weights_alone} holds only weights: a run cannot resume from it. It can be validated"
            f" and tested, and a new run can start from its weights: init_weights={weights_alone}"
        )
    if not damaged:
        raise NoCheckpointError(_nothing(requested, stores))
    raise CheckpointError(f"{_nothing(requested, stores)} {damaged}")


def _in_order(stores: Sequence[Store]) -> Iterator[tuple[Store, str]]:
    """Yield all checkpoints, the newest first."""
    first = [store for store in stores if store.comes_first]
    for group in (first, [store for store in stores if store not in first]):
        there = [(written(store, name), store, name) for store in group for name in store.names()]
        for _, store, name in sorted(there, key=lambda entry: entry[0], reverse=True):
            yield store, name


def written(store: Store, name: str) -> str:
    """Return the time of writing as text that sorts by time;
    if it cannot be read, text that sorts last.
    """
    try:
        with store.fetch(name, manifest_alone=True) as folder:
            time = datetime.fromisoformat(read_manifest(folder)["written"])
            return time.isoformat(timespec="microseconds")
    except (CheckpointError, KeyError, ValueError, TypeError):
        return _UNKNOWN  # tried first, and so reported


def later(last: str, stores: Sequence[Store]) -> str:
    """Return a time of writing after the `last` one of this process; if that is "", after those of
    all checkpoints there are. The clocks of hosts that run one after the other differ.
    """
    times = [last or "1970-01-01"]
    for store in () if last else stores:
        with suppress(OSError):  # of a checkpoint elsewhere, which stops no other
            times += [written(store, name) for name in store.names()]
    newest = max(time for time in times if time < _UNKNOWN)
    after = datetime.fromisoformat(newest) + timedelta(microseconds=1)
    return max(now(), after.isoformat(timespec="microseconds"))


def _best(stores: Sequence[Store]) -> tuple[Store, str]:
    for store in stores:
        name = store.target("best")
        if name is not None:
            return store, name
    raise NoCheckpointError(_nothing("best", stores))


def _named(ckpt_path: str) -> tuple[Store, str]:
    if "://" in ckpt_path:
        place, _, name = ckpt_path.rstrip("/").rpartition("/")
        store = make_store(place)
        return store, store.target(name) or name if name in ("last", "best") else name
    path = Path(ckpt_path)
    if not (path / MANIFEST).is_file():
        hint = ""
        if path.is_file():
            hint = (
                f" This is a file of one: ckpt_path={path.parent}."
                if (path.parent / MANIFEST).is_file()
                else f" A new run can begin with the weights of a file: init_weights={ckpt_path}."
            )
        raise NoCheckpointError(
            f"ckpt_path is '{ckpt_path}'; it must be 'last', 'best', or the folder of a checkpoint"
            f" (it holds a {MANIFEST}).{hint}"
        )
    path = Path(os.path.realpath(path))
    return make_store(path.parent), path.name


def _nothing(requested: str, stores: Sequence[Store]) -> str:
    there = sorted(name for store in stores for name in store.names())
    available = f"there are {', '.join(there)}" if there else "there are no checkpoints there"
    hint = "" if there else _newest_run_hint(Path(stores[-1].place).parent)
    what = "checkpoint" if requested == "auto" else f"'{requested}'"
    return (
        f"ckpt_path is '{requested}', and {stores[0].place} has no complete {what};"
        f" {available}.{hint}"
    )


def _newest_run_hint(run_dir: Path) -> str:
    runs = [p.parent.parent for p in run_dir.parent.glob("*/checkpoints/last")]
    if not runs:
        return " Give the run's folder: run_dir=..."
    newest = max(runs, key=lambda p: p.stat().st_mtime)
    return f" The newest run with checkpoints is run_dir={newest}"
