"""Folders for files on their way to or from a store;
those of processes that were killed are removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "trainkit-transfer-"


@contextlib.contextmanager
def transfer_folder() -> Iterator[Path]:
    """Make a temporary folder, and remove it at the end;
    it is locked meanwhile, for `remove_left_folders`.
    """
    while True:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))
            # it was removed, or a file system without locks, where none is removed
            with contextlib.suppress(OSError):
                stack.enter_context(_locked(folder, fcntl.LOCK_EX))
            if folder.is_dir():  # else another process removed it before it was locked
                yield folder
                return


def remove_left_folders() -> None:
    """Remove the folders of this user's processes that have ended without it, as by SIGKILL:
    no process has locked them.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind)  # ends with the last process that has the descriptor
        yield
    finally:
        os.close(descriptor)
