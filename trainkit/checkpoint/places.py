"""The store of a folder or URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trainkit.checkpoint.store import LocalStore, Store
from trainkit.errors import CheckpointError, ConfigError, clause
from trainkit.extension import url_store


def make_store(place: str | Path) -> Store:
    """Return the store of a folder or URL.

    Raises:
        ConfigError: no file system is known for the URL.
    """
    text = str(place)
    if "://" not in text:
        return LocalStore(Path(text))
    kind = url_store()
    if kind is None:
        raise ConfigError(
            f"'{text}' is a URL, and this copy of trainkit lacks the extension object_store, which"
            " reads and writes checkpoints at URLs. Give a folder, or install trainkit whole."
        )
    store: Store = kind(text)
    return store


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yield a path on this machine for a path or the URL of a checkpoint.

    Raises:
        CheckpointError: the URL cannot be read.
    """
    if "://" not in path:
        yield path
        return
    place, _, name = path.rstrip("/").rpartition("/")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(make_store(place).fetch(name))
        except OSError as error:
            raise CheckpointError(
                f"'{path}' cannot be read: {type(error).__name__}: {clause(error)}. Check its spelling,"
                " that this machine reaches it, and its credentials; or copy it to a folder, and"
                " give that one's path."
            ) from error
        yield str(folder)
