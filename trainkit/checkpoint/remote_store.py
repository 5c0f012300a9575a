"""RemoteStore: checkpoints at an fsspec URL.

Object stores cannot rename: the manifest is uploaded last, and a folder without one is no checkpoint. `last` and `best` are
small files, and so is the lease by which one run at a time writes here (run/lease.py): `guard` asks for it before each change.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec

from trainkit.checkpoint.format import MANIFEST, Snapshot, write
from trainkit.checkpoint.parts import Part, await_parts, file_of, write_part
from trainkit.checkpoint.store import Store, Take, nothing_left
from trainkit.errors import ConfigError


class RemoteStore(Store):
    """An fsspec URL. Errors of its file system are raised as OSError.

    Attributes:
        guard: called before each change of a checkpoint; raises LeaseLost if the URL is another run's by now.
    """

    def __init__(self, url: str) -> None:
        self.place = url.rstrip("/")
        self.guard: Callable[[], None] = lambda: None
        try:
            self._files: Any = fsspec.filesystem(url.partition("://")[0])
        except (ValueError, ImportError) as error:
            raise ConfigError(f"'{url}' cannot be written to: {error}.") from error

    def write(self, name: str, snapshot: Snapshot, take: Take = nothing_left) -> None:
        self.guard()
        part, there = snapshot.part, self.path_of(name)
        try:
            parts = {} if part is None else await_parts(take, lambda file: self._size_of(f"{there}/{file}"), part)
            with tempfile.TemporaryDirectory(prefix="trainkit-checkpoint-") as folder:
                write(Path(folder), snapshot, parts)
                keeps = () if part is None else tuple(file_of(rank, part.ranks) for rank in range(part.ranks))
                _as_os_error(lambda: self._upload(there, Path(folder), keeps), there)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                if not self._files.exists(f"{there}/{MANIFEST}"):  # else it is a former checkpoint's
                    self._files.rm(there, recursive=True)
            raise

    def write_part(self, name: str, part: Part) -> dict[str, Any]:
        self.guard()
        there = self.path_of(name)
        with tempfile.TemporaryDirectory(prefix="trainkit-part-") as folder:
            about = write_part(Path(folder), part)
            _as_os_error(lambda: self._put(Path(folder, file_of(part.rank, part.ranks)), there), there)
        return about

    def _put(self, path: Path, there: str) -> None:
        self._files.makedirs(there, exist_ok=True)
        self._files.put_file(str(path), f"{there}/{path.name}")

    def _size_of(self, path: str) -> int | None:
        def ask() -> int:
            self._files.invalidate_cache()  # another host has written it
            return int(self._files.size(path))

        try:
            size: int = _as_os_error(ask, path)
        except FileNotFoundError:
            return None
        return size

    def _upload(self, there: str, folder: Path, keeps: Sequence[str]) -> None:
        """Upload a folder's files, the manifest last; of what is there only files named in `keeps` stay."""
        if self._files.exists(f"{there}/{MANIFEST}"):
            self._files.rm(f"{there}/{MANIFEST}")  # first: without it the folder is no checkpoint
        for path in self._files.ls(there, detail=False) if self._files.exists(there) else ():
            if str(path).rsplit("/", 1)[-1] not in keeps:
                self._files.rm(path, recursive=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            self._put(path, there)

    def names(self) -> list[str]:
        found = _as_os_error(lambda: self._files.glob(f"{self.place}/*/{MANIFEST}"), self.place)
        return sorted(str(path).split("/")[-2] for path in found)

    def remove(self, name: str) -> None:
        self.guard()
        with contextlib.suppress(OSError):
            _as_os_error(lambda: self._files.rm(f"{self.path_of(name)}/{MANIFEST}"), name)
            _as_os_error(lambda: self._files.rm(self.path_of(name), recursive=True), name)

    def point(self, link: str, name: str) -> None:
        self.guard()
        self.write_file(link, name.encode())

    def target(self, link: str) -> str | None:
        name = self.read_file(link)
        return None if name is None else name.decode(errors="replace").strip()

    def read_file(self, name: str) -> bytes | None:
        """Return the content of a small file beside the checkpoints, None if there is none."""
        try:
            content: bytes = _as_os_error(lambda: self._files.cat_file(self.path_of(name)), self.path_of(name))
        except FileNotFoundError:
            return None
        return content

    def write_file(self, name: str, content: bytes, is_new: bool = False) -> None:
        """Write a small file beside the checkpoints.

        Args:
            is_new: raise OSError if it exists: atomically if the store has conditional writes (S3, GCS).
        """
        if is_new:
            _as_os_error(lambda: self._files.makedirs(self.place, exist_ok=True), self.place)
        mode = {"mode": "create"} if is_new else {}
        _as_os_error(lambda: self._files.pipe_file(self.path_of(name), content, **mode), self.path_of(name))

    def remove_file(self, name: str) -> None:
        """Delete a small file beside the checkpoints."""
        _as_os_error(lambda: self._files.rm_file(self.path_of(name)), self.path_of(name))

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


def _as_os_error(work: Callable[[], Any], what: str) -> Any:
    """Run an operation of a remote file system; each library behind fsspec has its own errors."""
    try:
        return work()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error
