"""RemoteStore: checkpoints at an fsspec URL.

Object stores cannot rename: the manifest is uploaded last, and a folder without one is no
checkpoint. `last` and `best` are small files, and so is the lease by which one run at a time writes
here (lease.py): `guard` asks for it before each change.
"""

from __future__ import annotations

import contextlib
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
        there = self.path_of(name)
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
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                # else it is a former checkpoint's
                if not self._files.exists(f"{there}/{MANIFEST}"):
                    self._files.rm(there, recursive=True)
            raise

    def write_part(self, name: str, part: RankFile) -> dict[str, Any]:
        self.guard()
        there = self.path_of(name)
        with transfer_folder() as folder:
            about = write_part(folder, part)
            as_os_error(lambda: self._put(folder / file_of(part.rank, part.ranks), there), there)
        return about

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
        if self._files.exists(f"{there}/{MANIFEST}"):
            self._files.rm(f"{there}/{MANIFEST}")  # first: without it the folder is no checkpoint
        for path in self._files.ls(there, detail=False) if self._files.exists(there) else ():
            if str(path).rsplit("/", 1)[-1] not in keeps:
                self._files.rm(path, recursive=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            self._put(path, there)

    def names(self) -> list[str]:
        """Return the names of folders with a manifest and a file that it may describe:
        other objects may lie there, too.
        """

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
        return sorted(
            name
            for name, held in files.items()
            if MANIFEST in held and any(map(_is_described, held))
        )

    def remove(self, name: str) -> None:
        self.guard()
        with contextlib.suppress(OSError):
            as_os_error(lambda: self._files.rm(f"{self.path_of(name)}/{MANIFEST}"), name)
            as_os_error(lambda: self._files.rm(self.path_of(name), recursive=True), name)

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
                self._fetch_into(folder, there, manifest_alone)
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


def _is_described(file: str) -> bool:
    return file in (WEIGHTS, TRAINING) or is_file_of_rank(file)
