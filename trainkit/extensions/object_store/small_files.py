"""Small files at an fsspec URL, beside checkpoints; errors in one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec

from trainkit.errors import ConfigError, clause


class SmallFiles:
    """The files of an fsspec URL. Errors of its file system are raised as OSError.

    Attributes:
        place: the URL.
    """

    def __init__(self, url: str) -> None:
        self.place = url.rstrip("/")
        try:
            self._files: Any = fsspec.filesystem(url.partition("://")[0])
        except (ValueError, ImportError) as error:
            raise ConfigError(f"'{url}' cannot be written to: {clause(error)}.") from error

    def path_of(self, name: str) -> str:
        """Return a file's URL."""
        return f"{self.place}/{name}"

    def read_file(self, name: str) -> bytes | None:
        """Return the content of a small file beside the checkpoints, None if there is none."""
        try:
            content: bytes = as_os_error(
                lambda: self._files.cat_file(self.path_of(name)), self.path_of(name)
            )
        except FileNotFoundError:
            return None
        return content

    def write_file(self, name: str, content: bytes, is_new: bool = False) -> None:
        """Write a small file beside the checkpoints.

        Args:
            is_new: raise OSError if it exists: atomically if the store has conditional writes (S3,
                GCS).
        """
        if is_new:
            as_os_error(lambda: self._files.makedirs(self.place, exist_ok=True), self.place)
        mode = {"mode": "create"} if is_new else {}
        as_os_error(
            lambda: self._files.pipe_file(self.path_of(name), content, **mode), self.path_of(name)
        )

    def remove_file(self, name: str) -> None:
        """Delete a small file beside the checkpoints."""
        as_os_error(lambda: self._files.rm_file(self.path_of(name)), self.path_of(name))


def as_os_error(work: Callable[[], Any], what: str) -> Any:
    """Run an operation of a remote file system; each library behind fsspec has its own errors."""
    try:
        return work()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error
