"""Stores of checkpoints: a folder of this machine, or any fsspec URL (s3://, gs://, memory://).

    write    a reader sees all of a checkpoint or none of it
    names    the existing checkpoints
    point    `last` and `best`: names for a checkpoint beside them
    fetch    a checkpoint's folder on this machine, to read from
    tidy     removes the leftovers of a killed writer

LocalStore writes under a name that starts with a dot and renames; `last` and `best` are links.
The other is of the extension object_store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainkit.checkpoint.files import flush
from trainkit.checkpoint.format import MANIFEST, TRAINING, WEIGHTS, Snapshot, write
from trainkit.checkpoint.parts import RankFile, await_parts, write_part
from trainkit.errors import CheckpointError

LINKS = ("last", "best")
Take = Callable[[str], bytes | None]
OnMain = Callable[[Callable[[], Any]], Any]
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<number>\d+)\.(?P<kind>draft|before)")
_PID = 1 << 32  # numbers of drafts below are process ids, those above tokens of parts


class LeaseLost(CheckpointError):  # noqa: N818 - an event
    """Another run has taken this run's URL: nothing there may be changed, and the run ends."""


def nothing_left(key: str) -> bytes | None:
    """Return None: without parts no rank leaves a report."""
    return None


class Store(ABC):
    """See the module.

    Attributes:
        place: its folder or URL, as text.
        compares: whether `fetch` has compared a checkpoint's files with their hashes.
        comes_first: whether its newest checkpoint is newer than those of other stores.
    """

    place: str
    compares = False

    @property
    def comes_first(self) -> bool:
        """See the attributes."""
        return False

    def held(
        self, run_dir: Path, on_main: OnMain, is_later_attempt: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context within which no other run writes here. Enter it on all ranks. A folder
        is locked with its run's.

        Args:
            run_dir: of the run.
            on_main: runs a function on rank 0, and returns its value on all ranks.
            is_later_attempt: of an elastic job.

        Raises:
            ConfigError: another run writes here, or nothing can be written.
        """
        return contextlib.nullcontext()

    def path_of(self, name: str) -> str:
        """Return a checkpoint's path or URL, for messages and for `ckpt_path`."""
        return f"{self.place}/{name}"

    @abstractmethod
    def write(self, name: str, snapshot: Snapshot, take: Take = nothing_left) -> None:
        """Write a checkpoint; replaces one of that name, and refuses to replace anything else.

        If the snapshot has a part, all ranks write theirs by `write_part`, and their reports are
        waited for.

        Args:
            take: returns a rank's report; see parts.await_parts.

        Raises:
            OSError: the write failed; it leaves nothing behind.
        """

    @abstractmethod
    def write_part(self, name: str, part: RankFile) -> dict[str, Any]:
        """Write this rank's part of a checkpoint that rank 0 writes at the same time; return its
        report.

        Raises:
            OSError: the write failed.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the existing checkpoints; they may be damaged (see format.verify)."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a checkpoint so that no part of it is taken for one. A failure is no error."""

    @abstractmethod
    def point(self, link: str, name: str) -> None:
        """Point `link` to the checkpoint `name`, atomically.

        Raises:
            OSError: it failed.
        """

    @abstractmethod
    def target(self, link: str) -> str | None:
        """Return the name that `link` points to, or None."""

    @abstractmethod
    def fetch(
        self, name: str, manifest_alone: bool = False
    ) -> contextlib.AbstractContextManager[Path]:
        """Return a context that yields the checkpoint's folder on this machine.

        Raises:
            OSError: it does not exist, or the store does not answer.
            CheckpointError: it was damaged, in two answers of a remote store.
        """

    @abstractmethod
    def tidy(self) -> None:
        """Remove the leftovers of a killed writer.
        Only for the process that holds the run's lock.
        """


class LocalStore(Store):
    """A folder. Hidden names are drafts (.NAME.PID.draft) and, briefly,
    a replaced checkpoint (.NAME.PID.before).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.place = str(self.folder)

    def write(self, name: str, snapshot: Snapshot, take: Take = nothing_left) -> None:
        folder, part = self.folder / name, snapshot.part
        draft, aside = self._draft(name, part), self.folder / f".{name}.{os.getpid()}.before"
        try:
            parts = (
                {} if part is None else await_parts(take, lambda file: _size_of(draft / file), part)
            )
            if folder.exists() and not _is_checkpoint(folder):
                raise FileExistsError(errno.EEXIST, "it exists and is no checkpoint", str(folder))
            self.folder.mkdir(parents=True, exist_ok=True)
            self._drop_older(part)
            if part is None:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
            write(draft, snapshot, parts)
            if folder.exists():
                folder.rename(aside)  # `tidy` restores it if the next line is never reached
            draft.rename(folder)
            flush(self.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            if aside.exists() and not folder.exists():
                aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def write_part(self, name: str, part: RankFile) -> dict[str, Any]:
        draft = self._draft(name, part)
        draft.mkdir(parents=True, exist_ok=True)
        return write_part(draft, part)

    def _drop_older(self, part: RankFile | None) -> None:
        """Remove drafts of earlier checkpoints in parts:
        a rank may have written into one after it had failed on rank 0.
        """
        for path in self.folder.iterdir() if part is not None else ():
            leftover = _LEFT.fullmatch(path.name)
            if (
                part is not None
                and leftover is not None
                and leftover["kind"] == "draft"
                and _PID < int(leftover["number"]) < part.token
            ):
                shutil.rmtree(path, ignore_errors=True)

    def _draft(self, name: str, part: RankFile | None) -> Path:
        return self.folder / f".{name}.{os.getpid() if part is None else part.token}.draft"

    def names(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        there = (
            p for p in self.folder.iterdir() if not p.is_symlink() and not p.name.startswith(".")
        )
        return sorted(p.name for p in there if p.name not in LINKS and _is_checkpoint(p))

    def remove(self, name: str) -> None:
        aside = self.folder / f".{name}.{os.getpid()}.draft"
        with contextlib.suppress(OSError):
            (self.folder / name).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def point(self, link: str, name: str) -> None:
        """Replaces a checkpoint's folder in the link's place (a run
        copied with its links followed).
        """
        path = self.folder / link
        if path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file():
            shutil.rmtree(path)
        draft = self.folder / f".{link}.{os.getpid()}.draft"
        draft.unlink(missing_ok=True)
        draft.symlink_to(name)
        draft.replace(path)

    def target(self, link: str) -> str | None:
        path = self.folder / link
        if path.is_symlink():
            return Path(os.readlink(path)).name
        return link if (path / MANIFEST).is_file() else None  # a copy of a run, its links followed

    @contextlib.contextmanager
    def fetch(self, name: str, manifest_alone: bool = False) -> Iterator[Path]:
        yield self.folder / name

    def tidy(self) -> None:
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            leftover = _LEFT.fullmatch(path.name)
            if leftover is None:
                continue  # another program's file
            if path.is_symlink():
                path.unlink(missing_ok=True)
            elif leftover["kind"] == "before" and not (self.folder / leftover["name"]).exists():
                path.rename(self.folder / leftover["name"])
            else:
                shutil.rmtree(path, ignore_errors=True)


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, WEIGHTS, TRAINING))
