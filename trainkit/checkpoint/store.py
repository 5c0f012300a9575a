"""Stores of checkpoints: a folder of this machine, or any fsspec URL (s3://, gs://, memory://).

    write    a reader sees all of a checkpoint or none of it
    names    the existing checkpoints
    point    `last` and `best`: names for a checkpoint beside them
    fetch    a checkpoint's folder on this machine, to read from
    tidy     removes the leftovers of a killed writer

LocalStore writes under a name that starts with a dot and renames; `last` and `best` are links. RemoteStore uploads the
manifest last, since object stores cannot rename; a folder without one is no checkpoint. `last` and `best` are small files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from trainkit.checkpoint.format import MANIFEST, TRAINING, WEIGHTS, Snapshot, flush, write
from trainkit.errors import ConfigError

LINKS = ("last", "best")
_LEFT = re.compile(r"\.(?P<name>.+)\.\d+\.(?P<kind>draft|before)")


class Store(ABC):
    """See the module. `place` is its folder or URL, as text."""

    place: str

    def path_of(self, name: str) -> str:
        """Return a checkpoint's path or URL, for messages and for `ckpt_path`."""
        return f"{self.place}/{name}"

    @abstractmethod
    def write(self, name: str, snapshot: Snapshot) -> None:
        """Write a checkpoint; replaces one of that name, and refuses to replace anything else.

        Raises:
            OSError: the write failed; it leaves nothing behind.
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
    def fetch(self, name: str, manifest_alone: bool = False) -> contextlib.AbstractContextManager[Path]:
        """Return a context that yields the checkpoint's folder on this machine."""

    @abstractmethod
    def tidy(self) -> None:
        """Remove the leftovers of a killed writer. Only for the process that holds the run's lock."""


def make_store(place: str | Path) -> Store:
    """Return the store of a folder or URL.

    Raises:
        ConfigError: no file system is known for the URL.
    """
    text = str(place)
    return RemoteStore(text) if "://" in text else LocalStore(Path(text))


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yield a path on this machine for a path or the URL of a checkpoint."""
    if "://" not in path:
        yield path
        return
    place, _, name = path.rstrip("/").rpartition("/")
    with make_store(place).fetch(name) as folder:
        yield str(folder)


class LocalStore(Store):
    """A folder. Hidden names are drafts (.NAME.PID.draft) and, briefly, a replaced checkpoint (.NAME.PID.before)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.place = str(self.folder)

    def write(self, name: str, snapshot: Snapshot) -> None:
        folder = self.folder / name
        if folder.exists() and not _is_checkpoint(folder):
            raise FileExistsError(errno.EEXIST, "it exists and is no checkpoint", str(folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        draft, aside = (self.folder / f".{name}.{os.getpid()}{end}" for end in (".draft", ".before"))
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            write(draft, snapshot)
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

    def names(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        there = (p for p in self.folder.iterdir() if not p.is_symlink() and not p.name.startswith("."))
        return sorted(p.name for p in there if p.name not in LINKS and _is_checkpoint(p))

    def remove(self, name: str) -> None:
        aside = self.folder / f".{name}.{os.getpid()}.draft"
        with contextlib.suppress(OSError):
            (self.folder / name).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def point(self, link: str, name: str) -> None:
        """Replaces a checkpoint's folder in the link's place (a run copied with its links followed)."""
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
            found = _LEFT.fullmatch(path.name)
            if found is None:
                continue  # another program's file
            if path.is_symlink():
                path.unlink(missing_ok=True)
            elif found["kind"] == "before" and not (self.folder / found["name"]).exists():
                path.rename(self.folder / found["name"])
            else:
                shutil.rmtree(path, ignore_errors=True)


class RemoteStore(Store):
    """An fsspec URL. Errors of its file system are raised as OSError."""

    def __init__(self, url: str) -> None:
        self.place = url.rstrip("/")
        try:
            self._files: Any = fsspec.filesystem(url.partition("://")[0])
        except (ValueError, ImportError) as error:
            raise ConfigError(f"'{url}' cannot be written to: {error}.") from error

    def write(self, name: str, snapshot: Snapshot) -> None:
        with tempfile.TemporaryDirectory(prefix="trainkit-checkpoint-") as folder:
            write(Path(folder), snapshot)
            _as_os_error(lambda: self._upload(name, Path(folder)), self.path_of(name))

    def _upload(self, name: str, folder: Path) -> None:
        there = self.path_of(name)
        self._files.makedirs(there, exist_ok=True)
        if self._files.exists(f"{there}/{MANIFEST}"):
            self._files.rm(f"{there}/{MANIFEST}")  # first: without it the folder is no checkpoint
        if self._files.exists(there):
            self._files.rm(there, recursive=True)
            self._files.makedirs(there, exist_ok=True)
        try:
            for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
                self._files.put_file(str(path), f"{there}/{path.name}")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._files.rm(there, recursive=True)
            raise

    def names(self) -> list[str]:
        found = _as_os_error(lambda: self._files.glob(f"{self.place}/*/{MANIFEST}"), self.place)
        return sorted(str(path).split("/")[-2] for path in found)

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            _as_os_error(lambda: self._files.rm(f"{self.path_of(name)}/{MANIFEST}"), name)
            _as_os_error(lambda: self._files.rm(self.path_of(name), recursive=True), name)

    def point(self, link: str, name: str) -> None:
        _as_os_error(lambda: self._files.pipe_file(f"{self.place}/{link}", name.encode()), self.path_of(link))

    def target(self, link: str) -> str | None:
        try:
            name: bytes = _as_os_error(lambda: self._files.cat_file(f"{self.place}/{link}"), self.path_of(link))
        except FileNotFoundError:
            return None
        return name.decode(errors="replace").strip()

    @contextlib.contextmanager
    def fetch(self, name: str, manifest_alone: bool = False) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="trainkit-checkpoint-") as folder:
            paths = [f"{self.path_of(name)}/{MANIFEST}"]
            if not manifest_alone:
                paths = _as_os_error(lambda: self._files.ls(self.path_of(name), detail=False), self.path_of(name))
            for path in paths:
                to = f"{folder}/{path.rsplit('/', 1)[-1]}"
                _as_os_error(functools.partial(self._files.get_file, path, to), path)
            yield Path(folder)

    def tidy(self) -> None:
        """Leaves folders without a manifest: their owner is unknown."""


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, WEIGHTS, TRAINING))


def _as_os_error(work: Callable[[], Any], what: str) -> Any:
    """Run an operation of a remote file system; each library behind fsspec has its own errors."""
    try:
        return work()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error
