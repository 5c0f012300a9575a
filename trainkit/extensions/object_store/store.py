"""RemoteStore: checkpoints at an fsspec URL.

Object stores cannot rename: the manifest is uploaded last, and a folder without one is no
checkpoint. `last` and `best` are small files, and so is the lease by which one run at a time writes
here (lease.py): `guard` asks for it before each change.

What replaces a checkpoint is uploaded beside it, and stands for it once it is whole:

    NAME/          is read, if it has a manifest
    .NAME.next/    is read, if it has one and NAME has none

write     uploads into the one that is not read; the manifest of the other is removed then
_move     what stands beside NAME is copied to it, the manifest last, and removed
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.checkpoint.files import check_files
from trainkit.checkpoint.format import MANIFEST, TRAINING, WEIGHTS, Snapshot, read_manifest, write
from trainkit.checkpoint.parts import RankFile, await_parts, file_of, is_file_of_rank, write_part
from trainkit.checkpoint.store import OnMain, Store, Take, nothing_left
from trainkit.console import warning
from trainkit.errors import CheckpointError
from trainkit.extensions.object_store.lease import StoreLease
from trainkit.extensions.object_store.small_files import SmallFiles, as_os_error
from trainkit.extensions.object_store.transfer import remove_left_folders, transfer_folder
from trainkit.safety.untrusted import check_name

_BESIDE = re.compile(r"\.(?P<name>.+)\.next")


class RemoteStore(SmallFiles, Store):
    """An fsspec URL. Errors of its file system are raised as OSError.

    What is fetched is compared with its manifest: a download may be damaged though the checkpoint
    is not.

    Attributes:
        guard: called before each change of a checkpoint; raises LeaseLost if the URL is another
            run's by now.
    """

    compares = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.guard: Callable[[], None] = lambda: None
        remove_left_folders()

    @contextlib.contextmanager
    def held(self, run_dir: Path, on_main: OnMain, is_later_attempt: bool) -> Iterator[None]:
        """See Store: a file at the URL says whose it is."""
        with StoreLease(self, run_dir) as lease:
            lease.adopt(on_main(partial(lease.take, is_later_attempt)))
            self.guard = lease.check
            yield

    def write(self, name: str, snapshot: Snapshot, take: Take = nothing_left) -> None:
        self.guard()
        part = snapshot.part
        own = self.path_of(name)
        there = self._unread(name)
        try:
            parts = (
                {}
                if part is None
                else await_parts(take, lambda file: self._size_of(f"{there}/{file}"), part)
            )
            with transfer_folder() as folder:
                write(folder, snapshot, parts)
                keeps = (
                    ()
                    if part is None
                    else tuple(file_of(rank, part.ranks) for rank in range(part.ranks))
                )
                as_os_error(lambda: self._upload(there, folder, keeps), there)
            if there != own:  # readers take the new one from here on
                as_os_error(lambda: self._files.rm(f"{own}/{MANIFEST}"), own)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                if there != self._read(name) or not self._is_whole(there):
                    self._files.rm(there, recursive=True)
            raise
        with contextlib.suppress(OSError):  # it can be read where it is; `tidy` tries again
            as_os_error(lambda: self._move(name), own)

    def write_part(self, name: str, part: RankFile) -> dict[str, Any]:
        self.guard()
        there = self._unread(name)
        with transfer_folder() as folder:
            about = write_part(folder, part)
            as_os_error(lambda: self._put(folder / file_of(part.rank, part.ranks), there), there)
        return about

    def _beside(self, name: str) -> str:
        return f"{self.place}/.{name}.next"

    def _is_whole(self, there: str) -> bool:
        # not `exists`, which answers "no" if the store does not answer
        return self._size_of(f"{there}/{MANIFEST}") is not None

    def _read(self, name: str) -> str:
        """Return where a checkpoint is read; see the module."""
        own, beside = self.path_of(name), self._beside(name)
        return beside if not self._is_whole(own) and self._is_whole(beside) else own

    def _unread(self, name: str) -> str:
        """Return where a checkpoint is written, the same on all ranks while it is written."""
        own = self.path_of(name)
        return self._beside(name) if self._is_whole(own) else own

    def _move(self, name: str) -> None:
        """Copy a checkpoint that stands beside its own place to that, and remove it."""
        own, beside = self.path_of(name), self._beside(name)
        if self._read(name) == beside:
            self._clear(own)
            self._files.makedirs(own, exist_ok=True)
            for file in sorted(self._files_in(beside), key=lambda file: file == MANIFEST):
                self._copy(f"{beside}/{file}", f"{own}/{file}")
        self._drop(beside)

    def _copy(self, path: str, to: str) -> None:
        self._files.cp_file(path, to)
        if self._size_of(to) != self._size_of(path):
            raise OSError(f"{to} is not the whole copy of {path}")

    def _drop(self, there: str) -> None:
        """Remove all that is there, the manifest first: without it no reader takes the folder for a checkpoint."""
        for path in (f"{there}/{MANIFEST}", there):
            with contextlib.suppress(FileNotFoundError):
                as_os_error(partial(self._files.rm, path, recursive=path == there), path)

    def _clear(self, there: str, keeps: Sequence[str] = ()) -> None:
        """The same, but for the files named in `keeps`."""
        if self._is_whole(there):
            self._files.rm(f"{there}/{MANIFEST}")
        for path in self._files.ls(there, detail=False) if self._files.exists(there) else ():
            if str(path).rsplit("/", 1)[-1] not in keeps:
                self._files.rm(path, recursive=True)

    def _put(self, path: Path, there: str) -> None:
        self._files.makedirs(there, exist_ok=True)
        self._files.put_file(str(path), f"{there}/{path.name}")

    def _size_of(self, path: str) -> int | None:
        def ask() -> int:
            self._files.invalidate_cache()  # another host has written it
            return int(self._files.size(path))

        try:
            size: int = as_os_error(ask, path)
        except FileNotFoundError:
            return None
        return size

    def _upload(self, there: str, folder: Path, keeps: Sequence[str]) -> None:
        """Upload a folder's files, the manifest last;
        of what is there only files named in `keeps` stay.
        """
        self._clear(there, keeps)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            self._put(path, there)

    def names(self) -> list[str]:
        """Return the names of folders with a manifest and a file that it may describe:
        other objects may lie there, too.
        """
        return sorted({_name_of(folder) for folder in self._whole_folders()})

    def _whole_folders(self) -> list[str]:
        def ask() -> dict[str, dict[str, Any]]:
            self._files.invalidate_cache()  # another host may have written
            manifests: dict[str, dict[str, Any]] = self._files.glob(
                f"{self.place}/*/*", detail=True
            )
            return manifests

        files: dict[str, set[str]] = {}
        for path, about in as_os_error(ask, self.place).items():
            if about["type"] == "file":
                *_, folder, file = path.split("/")
                files.setdefault(folder, set()).add(file)
        return [
            folder
            for folder, held in files.items()
            if MANIFEST in held and any(map(_is_described, held))
        ]

    def remove(self, name: str) -> None:
        self.guard()
        with contextlib.suppress(OSError):
            for there in (self._beside(name), self.path_of(name)):  # else the first would be read
                self._drop(there)

    def point(self, link: str, name: str) -> None:
        self.guard()
        self.write_file(link, name.encode())

    def target(self, link: str) -> str | None:
        name = self.read_file(link)
        return None if name is None else name.decode(errors="replace").strip()

    @contextlib.contextmanager
    def fetch(self, name: str, manifest_alone: bool = False) -> Iterator[Path]:
        there = self.path_of(name)
        with transfer_folder() as folder:
            try:
                self._fetch_into(folder, self._read(name), manifest_alone)
                yield folder
            except CheckpointError as error:
                if str(folder) not in str(error):
                    raise
                raise CheckpointError(str(error).replace(str(folder), there)) from error

    def _fetch_into(self, folder: Path, there: str, manifest_alone: bool) -> None:
        others = [] if manifest_alone else self._files_in(there)
        # weights of another program: nothing to compare with
        if not manifest_alone and MANIFEST not in others:
            for file in others:
                self._get(f"{there}/{file}", folder / file)
            return
        self._download(there, folder, MANIFEST, read_manifest)
        for file, about in {} if manifest_alone else read_manifest(folder)["files"].items():
            self._download(there, folder, file, partial(check_files, files={file: about}))

    def _files_in(self, there: str) -> list[str]:
        self._files.invalidate_cache()
        entries = as_os_error(lambda: self._files.ls(there, detail=True), there)
        names = [
            str(about["name"]).rpartition("/")[2] for about in entries if about["type"] == "file"
        ]
        return [name for name in names if name]  # an object that stands for a folder has none

    def _download(
        self, there: str, folder: Path, file: str, check: Callable[[Path], object]
    ) -> None:
        """Download a file of a checkpoint and check it;
        one that does not arrive as it was written is asked for again.
        """
        to = check_name(folder, file)
        for is_last in (False, True):
            try:
                with contextlib.suppress(FileNotFoundError):  # `check` reports it
                    self._get(f"{there}/{file}", to)
                check(folder)
                return
            except (CheckpointError, OSError) as error:
                if is_last:
                    raise
                reason = str(error).replace(str(folder), there)
                warning(
                    f"{there}/{file} did not arrive as it was written, and is asked for again:"
                    f" {reason}"
                )

    def _get(self, path: str, to: Path) -> None:
        as_os_error(lambda: self._files.get_file(path, str(to)), path)

    def tidy(self) -> None:
        """Leaves folders without a manifest: their owner is unknown."""
        for folder in self._whole_folders():
            if _BESIDE.fullmatch(folder):
                self.guard()
                as_os_error(partial(self._move, _name_of(folder)), folder)


def _is_described(file: str) -> bool:
    return file in (WEIGHTS, TRAINING) or is_file_of_rank(file)


def _name_of(folder: str) -> str:
    beside = _BESIDE.fullmatch(folder)
    return folder if beside is None else beside["name"]
