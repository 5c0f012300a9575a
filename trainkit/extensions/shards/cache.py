"""Whole shards on this host's disk: shared by its ranks and loader workers, up to a size, the
longest unused ones evicted.

    open -> is it there? -> else, under the shard's lock: make room -> fetch to NAME.part -> size
    and sha256 -> fsync -> rename
         -> size and sha256, unless it was fetched now -> another content: remove it, print that
         once, fetch it again

A shard that is open when it is evicted stays readable to its reader: the file system keeps it, and
its place on the disk, until it is closed, which ShardDataset does when its window is past. Shards
of this machine's own file system are read where they are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from trainkit.console import warning
from trainkit.errors import ConfigError, DataError, clause
from trainkit.extensions.shards.index import Shard
from trainkit.extensions.shards.store import ShardStore, is_local

_PART = ".part"
_READ = 1 << 22
_AHEAD = 4  # shards fetched at the same time, ahead of their readers


class ShardCache:
    """See the module. Picklable, for loader workers.

    Args:
        folder: on a local disk; it is made.
        max_bytes: of all shards in it.
        store: opens the shards' URLs.
    """

    def __init__(self, folder: Path, max_bytes: int, store: ShardStore) -> None:
        self.folder = folder.absolute()
        self.max_bytes = max_bytes
        self.store = store
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def open(self, shard: Shard) -> BinaryIO:
        """Return a shard's file; it is fetched if it is not there, or has another content than the
        index says.

        Raises:
            DataError: it is missing, cannot be reached, or has another content than the index says;
                or the disk is full.
        """
        path = self.path_of(shard)
        if is_local(shard.url):
            return _open_local(path, shard)
        is_new = False  # whether this call has fetched it, and with that checked it
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                is_new = self.fetch(shard)
                continue
            difference = "" if is_new else _difference(file, shard)
            if not difference:
                with contextlib.suppress(OSError):
                    os.utime(path)  # it was used now
                return file
            with file:
                self._remove(
                    path,
                    file,
                    f"{shard.name} in data.cache_dir={self.folder} {difference}: it is fetched"
                    " again",
                )

    def path_of(self, shard: Shard) -> Path:
        """Return where a shard's file is, or will be."""
        if is_local(shard.url):
            return Path(shard.url.removeprefix("file://"))
        digest = hashlib.sha256(f"{shard.url}|{shard.size}|{shard.sha256}".encode()).hexdigest()[
            :16
        ]
        return self.folder / f"{digest}-{shard.name}"

    def fetch(self, shard: Shard) -> bool:
        """Fetch a shard, unless it is there; return whether it was fetched."""
        path = self.path_of(shard)
        if is_local(shard.url) or path.exists():
            return False
        with self.locked(path.name):
            if path.exists():  # another worker has fetched it
                return False
            part = path.with_name(f"{path.name}.{shard.size}{_PART}")
            part.unlink(missing_ok=True)  # of a process that was killed: this one has its lock
            try:
                while (other := self._reserve(shard, part)) is not None:
                    # until it is fetched: then it may be evicted
                    with self.locked(_shard_of(other)):
                        pass
                self.store.fetch(shard.url, part)
                with part.open("r+b") as file:
                    if difference := _difference(file, shard):
                        raise _other_content(shard, difference)
                    # a crash of the host leaves no file with a name and without content
                    os.fsync(file.fileno())
                with self.locked("room"):  # one that lists the files meanwhile would see neither
                    part.replace(path)
                return True
            except FileNotFoundError as error:
                raise DataError(
                    f"{shard.url} does not exist; its index lists it. Upload it again, or remove"
                    " the index."
                ) from error
            except OSError as error:
                raise self._in_words(shard, error) from error
            except DataError as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in (
                    errno.ENOSPC,
                    errno.EDQUOT,
                ):
                    raise self._in_words(shard, error.__cause__) from error
                raise
            finally:
                part.unlink(missing_ok=True)

    def fetch_ahead(self, shards: Iterable[Shard]) -> None:
        """Fetch shards in the background; a failure is left to the reader that meets it again."""
        missing = [
            shard
            for shard in shards
            if not is_local(shard.url) and not self.path_of(shard).exists()
        ]
        if missing and self._pool is None:
            self._pool = ThreadPoolExecutor(_AHEAD, "shards")
        for shard in missing:
            assert self._pool is not None
            self._pool.submit(self._try_to_fetch, shard)

    def close(self) -> None:
        """Fetch no more ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _try_to_fetch(self, shard: Shard) -> None:
        with contextlib.suppress(Exception):
            self.fetch(shard)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Let one process or thread of this host in at a time."""
        with self._lock_file(name) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # a worker that was forked meanwhile holds the file, too
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _lock_file(self, name: str) -> BinaryIO:
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            return (self.folder / "locks" / name).open("wb")
        except OSError as error:
            raise ConfigError(
                f"data.cache_dir is '{self.folder}', which cannot be written to ({error.strerror})."
                " Give a folder on a local disk."
            ) from error

    def _remove(self, path: Path, file: BinaryIO, message: str) -> None:
        """Remove a damaged file, unless another worker has replaced it;
        the one that removes it prints it.
        """
        with self.locked(path.name):
            there = _stat(path)
            if there is not None and os.path.samestat(there, os.fstat(file.fileno())):
                path.unlink()
                warning(message)

    def _reserve(self, shard: Shard, part: Path) -> Path | None:
        """Make room for a shard and return None;
        or return a part of another job or thread that has to be complete first.
        """
        with self.locked("room"):
            waited_for = self._make_room(shard)
            if waited_for is None:
                part.touch()  # its size counts from here on: see `_promised`
            return waited_for

    def _make_room(self, shard: Shard) -> Path | None:
        """Evict the longest unused shards until the new one fits;
        if parts leave too little room, return one of them.
        """
        if shard.size > self.max_bytes:
            raise ConfigError(
                f"data.cache_size_gb is {self.max_bytes / 1e9:g}, and {shard.name} alone has"
                f" {shard.size / 1e9:.3g} GB; it must be more."
            )
        files = {
            path: stat
            for path in self.folder.iterdir()
            if path.is_file() and (stat := _stat(path)) is not None
        }
        for path in [path for path in files if path.name.endswith(_PART)]:
            if self._is_left(path):
                path.unlink(missing_ok=True)
                del files[path]
        sizes = {path: _promised(path) or stat.st_size for path, stat in files.items()}
        used = sum(sizes.values())
        for path in sorted(files, key=lambda path: files[path].st_mtime_ns):
            if used + shard.size <= self.max_bytes:
                break
            if not path.name.endswith(_PART):
                path.unlink(missing_ok=True)
                used -= sizes[path]
        if used + shard.size > self.max_bytes:
            return next(path for path in files if path.name.endswith(_PART))
        free = shutil.disk_usage(self.folder).free
        if shard.size > free:
            raise OSError(errno.ENOSPC, f"{free / 1e9:.2f} GB are free")
        return None

    def _is_left(self, part: Path) -> bool:
        """Whether the process that fetched into a file has ended: its lock is free."""
        with self._lock_file(_shard_of(part)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            fcntl.flock(lock, fcntl.LOCK_UN)
            return True

    def _in_words(self, shard: Shard, error: OSError) -> DataError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return DataError(
                f"{shard.url} cannot be kept in data.cache_dir={self.folder}: {clause(error)}."
            )
        used = sum(
            stat.st_size
            for path in self.folder.iterdir()
            if path.is_file() and (stat := _stat(path))
        )
        return DataError(
            f"The disk of data.cache_dir={self.folder} is full: {shard.name} needs"
            f" {shard.size / 1e9:.2f} GB, and the cache holds {used / 1e9:.2f} GB of at most"
            f" {self.max_bytes / 1e9:.2f}. Free the disk, lower data.cache_size_gb below what it"
            " can hold, or give another data.cache_dir."
        )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # evicted, or complete by now
        return None


def _shard_of(part: Path) -> str:
    """Return the name that a part will have, which is that of its lock."""
    return part.name.rsplit(".", 2)[0]


def _promised(path: Path) -> int:
    """Return the size that a part will have."""
    return int(path.name.rsplit(".", 2)[1]) if path.name.endswith(_PART) else 0


def _open_local(path: Path, shard: Shard) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); its index lists it.") from error
    size = os.fstat(file.fileno()).st_size
    if size != shard.size:
        file.close()
        raise _other_content(shard, f"has {size:,} bytes")
    return file


def _difference(file: BinaryIO, shard: Shard) -> str:
    """Return how a file's content differs from what the index says;
    "" if it does not, at the file's beginning.
    """
    size = os.fstat(file.fileno()).st_size
    if size != shard.size:
        return f"has {size:,} bytes"
    if shard.sha256:
        checksum = sha256_of(file)
        file.seek(0)
        if checksum != shard.sha256:
            return "has another checksum (sha256)"
    return ""


def sha256_of(file: BinaryIO) -> str:
    """Return the checksum of the rest of a file."""
    digest = hashlib.sha256()
    while block := file.read(_READ):
        digest.update(block)
    return digest.hexdigest()


def _other_content(shard: Shard, difference: str) -> DataError:
    return DataError(
        f"{shard.url} {difference}; its index promises {shard.size:,} bytes of another content: it is"
        " truncated, or was written again. Upload it again, or remove index.json, so that it is"
        " made again."
    )
