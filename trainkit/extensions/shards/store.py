"""Files at a path or an fsspec URL (s3://, gs://, https://):
the only place where shards meet fsspec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from trainkit.errors import ConfigError, DataError

Found = TypeVar("Found")


def is_local(url: str) -> bool:
    """Whether a path or URL is of this machine's file system."""
    return "://" not in url or url.startswith("file://")


def joined(root: str, name: str) -> str:
    """Return the path or URL of `name` in `root`; `name` itself if it is a whole one."""
    return name if "://" in name or name.startswith("/") else f"{root.rstrip('/')}/{name}"


class ShardStore:
    """Opens paths and URLs. Errors are DataErrors that name the URL, but for FileNotFoundError.

    Args:
        options: further arguments of fsspec's file system, as {anon: true}; keys belong into the
            environment.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def read(self, url: str) -> bytes:
        """Return a file's content."""
        content: bytes = self._ask(url, lambda files, path: files.cat_file(path))
        return content

    def size(self, url: str) -> int:
        """Return a file's bytes."""
        return int(self._ask(url, lambda files, path: files.info(path)["size"]))

    def exists(self, url: str) -> bool:
        """Whether there is such a file."""
        return bool(self._ask(url, lambda files, path: files.exists(path)))

    def fetch(self, url: str, path: Path) -> None:
        """Copy a file to this machine."""
        self._ask(url, lambda files, there: files.get_file(there, str(path)))

    def put(self, path: Path, url: str) -> None:
        """Copy a file of this machine to a URL, which then has all of it or nothing."""
        self.write(url, path)

    def write(self, url: str, content: bytes | Path) -> None:
        """Write a file, as a whole or not at all:
        an object appears when it is complete, a local file is renamed.
        """

        def work(files: Any, path: str) -> None:
            draft = f"{path}.{os.getpid()}.draft" if is_local(url) else path
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, bytes):
                files.pipe_file(draft, content)
            else:
                files.put_file(str(content), draft)
            if draft != path:
                os.replace(draft, path)

        self._ask(url, work)

    def remove(self, url: str) -> None:
        """Delete a file, if it is there."""
        self._ask(url, lambda files, path: files.rm_file(path) if files.exists(path) else None)

    def matching(self, pattern: str) -> list[str]:
        """Return the URLs that match a glob, sorted."""

        def work(files: Any, path: str) -> list[str]:
            return sorted(
                path if is_local(pattern) else files.unstrip_protocol(path)
                for path in files.glob(path)
            )

        return self._ask(pattern, work)

    def _ask(self, url: str, work: Callable[[Any, str], Found]) -> Found:
        try:
            files, path = fsspec.core.url_to_fs(url, **({} if is_local(url) else self.options))
        except (ValueError, ImportError, TypeError) as error:
            needs = (
                " Install it: pip install 'trainkit[shards]'."
                if isinstance(error, ImportError)
                else ""
            )
            raise ConfigError(
                f"'{url}' cannot be opened: {str(error).rstrip('.')}.{needs}"
            ) from error
        try:
            files.invalidate_cache()  # listings that it keeps: other processes write too
            return work(files, path)
        except FileNotFoundError:
            raise
        except Exception as error:  # any: each library behind fsspec has its own
            if isinstance(error, OSError) and is_local(url):
                raise DataError(f"{url}: {error.strerror or error}.") from error
            raise DataError(_in_words(url, error)) from error


def _in_words(url: str, error: Exception) -> str:
    kind, _, rest = url.partition("://")
    text = " ".join(str(error).split()).rstrip(".") or "no message"
    keys = (
        " For S3: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        if kind == "s3"
        else ""
    )
    if isinstance(error, PermissionError):
        return (
            f"{url} may not be read or written ({text}). Check the keys in the environment and the"
            f" bucket's rules.{keys}"
        )
    return (
        f"{url} cannot be reached ({type(error).__name__}: {text}). Check that this host reaches"
        f" {kind}://{rest.partition('/')[0].rpartition('@')[2]}, and the endpoint and keys in the"
        f" environment.{keys}"
    )
