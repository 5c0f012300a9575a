"""Whether the hosts of a job share a folder:
one process leaves a file there (`token_in`), and the others look for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".shared-"


@contextlib.contextmanager
def token_in(folder: Path, writer: str) -> Iterator[Path]:
    """Write a file of a new name into a folder, which is made if needed; yield its path, and remove
    both at the end.

    A folder that holds something else by then, and one that was there before, stays.

    Args:
        folder: of a run.
        writer: the role of the process in the run, "rank0" or "job". What killed processes of the
            role have left there is removed first.
    """
    with made_for_now(folder):
        remove_tokens(folder, writer)
        path = folder / f"{_PREFIX}{writer}-{secrets.token_hex(4)}"
        path.touch()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def remove_tokens(folder: Path, writer: str) -> None:
    """Remove the files that killed processes of this role have left in a folder."""
    for path in folder.glob(f"{_PREFIX}{writer}-*"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def made_for_now(folder: Path) -> Iterator[None]:
    """Make a folder with its parents;
    at the end remove those that were made here, and that are empty.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def sees(token: Path) -> bool:
    """Return whether this host sees a file that another one has left.

    The folder is made first: a client of NFS that has looked for it shortly before remembers for up
    to half a minute that it was not there, but asks the server when it makes it.
    """
    try:
        with made_for_now(token.parent):
            return token.exists()
    except OSError:
        return False


def host_name() -> str:
    """Return this host's name: its launcher's for it, or its own."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def not_shared(run_dir: str | Path, hosts: str, there: str = "") -> str:
    """Return the error of a run's folder that these hosts do not see;
    `there`: what they see in its place.
    """
    return (
        f"run_dir is '{run_dir}', and {hosts} does not see it{there}: it is not shared between the"
        " hosts, so that checkpoints would be lost with rank 0's. Give the absolute path of a"
        " shared folder (run_dir=...), or keep checkpoints in a store:"
        " callbacks.checkpoint.dirpath=s3://..."
    )
