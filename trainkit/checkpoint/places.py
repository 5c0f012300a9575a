"""The store of a folder or URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trainkit.checkpoint.remote_store import RemoteStore
from trainkit.checkpoint.store import LocalStore, Store


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
