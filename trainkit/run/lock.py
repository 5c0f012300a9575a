"""RunLock: one fit at a time in a run's folder.

The lock is a POSIX record lock on `<run_dir>/.lock`, which the kernel drops when its process has
ended in any way. Forked loader workers, which outlive a killed parent by seconds, do not inherit it
(as they would the flock that filelock takes), and it works over NFS. The file describes the holder
in JSON, for the error of a refused run; it is emptied at the end, and not deleted: a process that
has just opened it would lock a file that no other process sees.

If the filesystem has no locks, the file's text decides: a process of the same host is looked up,
another host's cannot be. Two runs that start at the same instant are not detected there. A Slurm
job that was queued again replaces its own earlier start, wherever that was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import stat
import sys
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from trainkit.console import warning
from trainkit.errors import ConfigError
from trainkit.launch.moments import boot_id
from trainkit.launch.slurm.step import start_of_job
from trainkit.safety.masking import masked_arguments

LOCK = ".lock"

_HELD = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_MOST_BYTES = 1 << 16
_AGAIN_S = 0.2
_REQUEUED_S = 60.0


class _HeldError(Exception):
    """Another process has the lock."""


class RunLock:
    """Holds a folder from `take` to the end of the context.
    A context manager; take it on rank 0.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._owner = 0

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def take(self, run_dir: Path, patience_s: float = 0.0) -> None:
        """Take the folder, before anything is written there.

        Args:
            patience_s: seconds to wait for the lock. If it is set, no takeover message is printed.

        Raises:
            ConfigError: another run has it (names host, process, command and start time), or it
                cannot be written to.
        """
        assert self._file is None, "a lock is taken once"
        path = run_dir / LOCK
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"run_dir is '{run_dir}', and {path} is no plain file. Delete it, or give another"
                " folder: run_dir=..."
            )
        _refuse_own(path, run_dir)
        # a file server may still have the lock of a node that is lost
        wait_s = patience_s or _REQUEUED_S * _is_earlier_start(_read(path))
        try:
            self._file, locked = _open_locked(path, wait_s)
        except _HeldError:
            raise ConfigError(_refusal(run_dir, _read(path))) from None
        except OSError as error:
            raise ConfigError(
                f"run_dir is '{run_dir}', and {path} cannot be written: {error.strerror}. Give"
                " another folder: run_dir=..."
            ) from error
        self._owner = os.getpid()
        holder = _content(self._file)
        try:
            if not locked and holder is not None:
                _refuse_described(run_dir, holder)
            try:
                _write(self._file, describe_self())
            except OSError:  # a full disk
                if not locked:
                    raise  # the text is the lock
        except BaseException:
            os.close(self._file)
            self._file = None
            raise
        if holder is not None and not patience_s:
            warning(
                f"{run_dir} was held by {name_of(holder)}, which was killed or lost its host; this"
                " run takes over."
            )

    def release(self) -> None:
        """Release the folder, if it is held.
        In a forked process it does not release the parent's lock.
        """
        if self._file is None:
            return
        if self._owner == os.getpid():
            # the disk is gone: the lock goes with the descriptor
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        os.close(self._file)
        self._file = None


def is_held(run_dir: Path) -> bool:
    """Return whether a fit holds the folder, as far as this host can see:
    of another host's process its file decides.
    """
    holder = holder_of(run_dir)
    if not holder or holder.get("host") != socket.gethostname():
        return bool(holder)
    return is_alive(holder)


def holder_of(run_dir: Path) -> dict[str, Any]:
    """Return the process that the folder's lock file describes, alive or not;
    {} if it describes none.
    """
    return _read(run_dir / LOCK)


def _open_locked(path: Path, patience_s: float) -> tuple[int, bool]:
    """Open and lock the file at `path`;
    return its descriptor and whether the filesystem has locks.
    """
    deadline = time.monotonic() + patience_s
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            locked = _lock(file)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file, locked
        except _HeldError:
            os.close(file)
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
            continue
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was deleted in between: another run would lock another file


def _lock(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise _HeldError from error
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _refuse_own(path: Path, run_dir: Path) -> None:
    """Refuse a folder that this process holds: the kernel would not, and closing a second
    descriptor would drop the lock.

    Looks through the process's open files, since a list of our own would be a global.
    """
    try:
        wanted = path.stat()
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            if (
                os.path.samestat(os.fstat(number), wanted)
                and (holder := _content(number) or {}).get("pid") == os.getpid()
            ):
                raise ConfigError(
                    f"run_dir is '{run_dir}', where a fit of this same process ({name_of(holder)})"
                    " is in progress. Let it end first, or give another folder: run_dir=..."
                )


def _refuse_described(run_dir: Path, holder: dict[str, Any]) -> None:
    """Without locks: refuse if the described process may be alive."""
    if holder.get("host") == socket.gethostname():
        if is_alive(holder):
            raise ConfigError(_refusal(run_dir, holder))
    elif not _is_earlier_start(holder):
        raise ConfigError(
            f"{_refusal(run_dir, holder)} This filesystem has no locks, so whether it still runs is"
            f" unknown: if you know that it does not, delete {run_dir / LOCK}."
        )


def _is_earlier_start(holder: dict[str, Any]) -> bool:
    """Return whether a holder is of an earlier start of this process's Slurm job: Slurm has ended
    it, or lost its node.
    """
    job, restarts = start_of_job()
    return holder.get("slurm") in [[job, before] for before in range(restarts)]


def describe_self() -> dict[str, Any]:
    """Return what describes this process to another run:
    host, number, command line, start of the run, birth, start of its Slurm job.
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": " ".join(shlex.join(masked_arguments(sys.orig_argv)).split()),  # on one line
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "birth": birth(os.getpid()),
        "slurm": start_of_job(),
    }


def is_alive(process: dict[str, Any]) -> bool:
    """Return whether a process of this host, described by its "pid" and "birth", has not ended."""
    return (born := birth(process["pid"])) is not None and born == process.get("birth")


def birth(pid: int) -> str | None:
    """Return a text that is unique among all processes ever with this number;
    None if it is not alive.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # the 22nd field of all: ticks from the boot to its start
    return None if state in "ZX" else f"{boot_id()} {rest[18]}"


def _read(path: Path) -> dict[str, Any]:
    """Read the holder of a file that this process does not hold:
    opening and closing it would drop its own lock.
    """
    try:
        # a pipe would wait for its writer
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        return (_content(file) or {}) if stat.S_ISREG(os.fstat(file).st_mode) else {}
    finally:
        os.close(file)


def _content(file: int) -> dict[str, Any] | None:
    return described(os.pread(file, _MOST_BYTES, 0))


def described(content: bytes) -> dict[str, Any] | None:
    """Return the described holder; {} if the text cannot be read, None if there is none."""
    if not content.strip(b"\0"):  # a crash of the host can leave zeros
        return None
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else {}


def _write(file: int, about: dict[str, Any]) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(about).encode() + b"\n", 0)


def name_of(holder: dict[str, Any]) -> str:
    """Return a holder in words."""
    if not holder:
        return "an unidentified run"
    return (
        f"process {holder['pid']} on {holder.get('host')} (`{holder.get('command')}`, since"
        f" {holder.get('started')})"
    )


def _refusal(run_dir: Path, holder: dict[str, Any]) -> str:
    whom = (
        "that process" if holder else f"the process that `fuser {run_dir / LOCK}` names on its host"
    )
    return (
        f"run_dir is '{run_dir}', where another run is going on: {name_of(holder)}. Two would"
        f" overwrite each other's files: give another folder (run_dir=...), or end {whom}."
    )
