"""StoreLease: one fit at a time at a URL of checkpoints, as RunLock is for a folder.

take      rank 0 writes `<url>/.lock`, which describes the run, before anything else is written there
beat      a thread of rank 0 writes it again every _BEAT_S seconds
check     before each change at the URL, on the rank that makes it: raises if the file describes another run
release   deletes it

No kernel deletes the file when its process is killed. The next run replaces it if that process was
of this machine and has ended, or if the file stays the same for _EXPIRES_S seconds by the next
run's own clock: clocks of hosts are not compared.

Where a store can create a file on condition that there is none (S3, GCS), one of two runs that
start together gets it. A store without conditional writes may let both start: `check` then ends the
one whose file was replaced, before it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from trainkit.checkpoint.store import LeaseLost
from trainkit.console import info, warning
from trainkit.errors import ConfigError, clause
from trainkit.extensions.object_store.small_files import SmallFiles
from trainkit.launch.environment import driver_address, job_started
from trainkit.launch.moments import boot_id
from trainkit.run.lock import LOCK, describe_self, described, is_alive, name_of
from trainkit.safety.threads import printed, start_thread

_BEAT_S = 10.0
_EXPIRES_S = 60.0
_RELEASE_S = 10.0  # for a beat that is being written


class StoreLease:
    """See the module. A context manager."""

    def __init__(self, store: SmallFiles, run_dir: Path) -> None:
        self._store = store
        self._run_dir = run_dir
        self._owner: dict[str, Any] = {}
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> StoreLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def take(self, is_later_attempt: bool = False) -> dict[str, Any]:
        """Take the URL on rank 0; return the run's description, for `adopt` on the other ranks.

        Args:
            is_later_attempt: of an elastic job: a store that does not answer costs checkpoints, not
                the run.

        Raises:
            ConfigError: another run holds it (names host, process, run_dir and start), or it cannot
                be written.
        """
        self._owner = _describe(self._run_dir)
        try:
            self._wait_for_turn()
        except OSError as error:
            if not is_later_attempt:
                raise ConfigError(
                    f"ModelCheckpoint.dirpath is '{self._store.place}', which cannot be written:"
                    f" {clause(error)}. Give another URL or folder: callbacks.checkpoint.dirpath=..."
                ) from error
        effect = (
            "It is started again. If it fails for a minute, another run can take the URL, and this"
            " run ends then."
        )
        self._beating = start_thread("trainkit-lease", self._beat, printed(effect, retry_s=_BEAT_S))
        return self._owner

    def adopt(self, owner: dict[str, Any]) -> None:
        """Take rank 0's description, to compare with."""
        self._owner = owner

    def check(self) -> None:
        """Read the file.

        Raises:
            LeaseLost: it describes another run.
        """
        try:
            there = self._store.read_file(LOCK)
        except OSError:
            return  # the change that follows fails as well, and that is reported
        if self._is_lost(there):
            holder = described(there or b"")
            what = "was deleted" if holder is None else f"is of another run now: {_name(holder)}"
            raise LeaseLost(
                f"{self._store.path_of(LOCK)}, by which this run (since {self._owner['started']})"
                f" holds '{self._store.place}', {what}. This run ends, since each would remove the"
                " other's checkpoints. Resume it at another URL: callbacks.checkpoint.dirpath=..."
                f" ckpt_path={self._store.path_of('last')}"
            )

    def release(self) -> None:
        """Let the next run have the URL."""
        self._ended.set()
        if self._beating is None:
            return
        self._beating.join(_RELEASE_S)  # else it could write the file after it was deleted
        with contextlib.suppress(OSError):  # the file expires
            if not self._beating.is_alive() and self._is_ours(self._store.read_file(LOCK)):
                self._store.remove_file(LOCK)

    def _wait_for_turn(self) -> None:
        seen = None
        since = 0.0
        while True:
            there = self._store.read_file(LOCK)
            now = time.monotonic()
            if (
                there is None
                or self._is_ours(there)
                or _has_ended(there)
                or (there == seen and now - since > _EXPIRES_S)
            ):
                if self._write_first(there):
                    return
                continue
            holder = described(there) or described(seen or b"") or {}
            if seen is None:
                seen = there
                since = now
                info(
                    f"'{self._store.place}' is held by {_name(holder)}. Waiting up to"
                    f" {_EXPIRES_S:g} s to see whether it still runs."
                )
            elif there != seen:
                raise ConfigError(
                    f"ModelCheckpoint.dirpath is '{self._store.place}', where another run is going"
                    f" on: {_name(holder)}. Two would overwrite and remove each other's"
                    " checkpoints: give another URL (callbacks.checkpoint.dirpath=...), or end"
                    " that process."
                )
            time.sleep(_BEAT_S / 5)

    def _write_first(self, there: bytes | None) -> bool:
        """Write the file in place of `there`; return whether it is this run's then."""
        try:
            self._write(is_new=there is None)
        except OSError:
            if there is not None:
                raise
            # no other run was first: the store has no conditional writes
            if self._store.read_file(LOCK) is None:
                self._write()
        if not self._is_ours(self._store.read_file(LOCK)):
            return False
        if there is not None and not self._is_ours(there):
            holder = _name(described(there) or {})
            warning(
                f"'{self._store.place}' was held by {holder}, which was killed or lost its host;"
                " this run takes over."
            )
        return True

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # the store does not answer: the next one may arrive
                if self._is_lost(self._store.read_file(LOCK)):
                    return  # `check` raises
                self._write()

    def _write(self, is_new: bool = False) -> None:
        about = self._owner | {"beat": datetime.now().astimezone().isoformat()}
        self._store.write_file(LOCK, json.dumps(about).encode() + b"\n", is_new)

    def _is_lost(self, there: bytes | None) -> bool:
        # a later attempt of an elastic job may write for an earlier one, which has released it
        if there is None:
            return not (self._owner["job"] or self._ended.is_set())
        # half of a text: a beat is being written
        return bool(described(there)) and not self._is_ours(there)

    def _is_ours(self, there: bytes | None) -> bool:
        holder = described(there or b"") or {}
        owner = self._owner
        of_job = bool(owner["job"]) and all(
            holder.get(name) == owner[name] for name in ("job", "run_dir")
        )
        return of_job or holder.get("id") == owner["id"]


def _describe(run_dir: Path) -> dict[str, Any]:
    # of one second's jobs; the address may differ from host to host
    port = driver_address().rpartition(":")[2]
    job = f"{job_started()} {port}" if job_started() else ""
    about = {
        "id": uuid.uuid4().hex,
        "run_dir": str(run_dir),
        "job": job,
        "processes": _processes_here(),
    }
    return describe_self() | about


def _has_ended(there: bytes) -> bool:
    """Return whether the described process is known to have ended:
    it was one of those that this process can see.
    """
    holder = described(there) or {}
    return (
        bool(holder) and holder.get("processes") == _processes_here() != "" and not is_alive(holder)
    )


def _processes_here() -> str:
    """Return what is equal for processes that see each other:
    this boot and its namespace of processes; "" if unknown.
    """
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _name(holder: dict[str, Any]) -> str:
    return (
        f"{name_of(holder)} with run_dir={holder['run_dir']}"
        if "run_dir" in holder
        else name_of(holder)
    )
