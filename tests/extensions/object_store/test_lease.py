"""One fit at a time at a URL of checkpoints, however the one before has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers import toy
from tests.helpers.object_store import serve, within
from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.store import LeaseLost
from trainkit.errors import ConfigError
from trainkit.extensions.object_store import lease as lease_module
from trainkit.extensions.object_store.lease import StoreLease
from trainkit.extensions.object_store.store import RemoteStore
from trainkit.run.lock import LOCK

# A process that takes a URL, says so, and holds it until its input ends.
HOLDER = """
import os, sys
from pathlib import Path
from trainkit.extensions.object_store.store import RemoteStore
from trainkit.extensions.object_store import lease

lease._BEAT_S = 0.05
with lease.StoreLease(RemoteStore(sys.argv[1]), Path("/runs/theirs")) as held:
    held.take()
    os.write(1, b"held\\n")
    os.read(0, 1)
"""
# What another run at the URL has written.
THEIRS = json.dumps(
    {"host": "elsewhere", "pid": 7, "started": "then", "id": "theirs", "run_dir": "/b"}
).encode()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats of a twentieth of a second."""
    monkeypatch.setattr(lease_module, "_BEAT_S", 0.05)


@pytest.fixture
def memory() -> str:
    """A URL of this process alone."""
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of each kind: an object store's, and one with folders, which have to be made."""
    return (
        str(request.getfixturevalue("memory"))
        if request.param == "memory"
        else f"file://{tmp_path}/not/there"
    )


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3 server's bucket."""
    with serve() as store, within(store.environment):
        yield store.url


def fit(url: str, run_dir: Path, callback: Callback | None = None, **settings: object) -> None:
    """Fit a line, with a checkpoint at the URL after each of two epochs."""
    callbacks = [ModelCheckpoint(dirpath=url), *([callback] if callback else [])]
    toy.quiet(run_dir, max_epochs=2, callbacks=callbacks).fit(toy.Line(), toy.loader(), **settings)


def names(url: str) -> list[str]:
    """Return the checkpoints at a URL."""
    return RemoteStore(url).names()


class Second(Callback):
    """Starts another fit at the URL when the first epoch of this one has ended."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self.url, self.run_dir, self.error = url, run_dir, ""

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        """Start it once."""
        if not self.error:
            with pytest.raises(ConfigError) as caught:
                fit(self.url, self.run_dir, ckpt_path="auto")
            self.error = str(caught.value)


def test_a_second_run_at_a_url_is_refused_and_the_holder_named(url: str, tmp_path: Path) -> None:
    """Also one that resumes from what is there;
    URL, host, process, folder, time and both ways out are named.
    """
    second = Second(url, tmp_path / "second")
    fit(url, tmp_path / "first", second)
    assert f"ModelCheckpoint.dirpath is '{url}'" in second.error
    assert f"process {os.getpid()} on {socket.gethostname()} (`" in second.error
    assert f"with run_dir={tmp_path / 'first'}. " in second.error
    assert ", since 2" in second.error
    assert "callbacks.checkpoint.dirpath=..." in second.error and "end that process" in second.error
    assert names(url) == ["epoch=1-step=12"]
    fit(url, tmp_path / "first", ckpt_path="last")  # the URL is free again
    assert RemoteStore(url).read_file(LOCK) is None


def test_at_s3_a_run_of_another_process_is_refused_until_it_is_killed(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conditional write makes the file;
    after SIGKILL on this machine the next run takes over at once, and says so.
    """
    url = f"{bucket}/{uuid.uuid4().hex}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(OSError, match="already exists|[Pp]re-?condition"):
            RemoteStore(url).write_file(LOCK, b"mine", is_new=True)
        with pytest.raises(
            ConfigError,
            match=rf"another run is going on: process {process.pid} on .*run_dir=/runs/theirs",
        ):
            fit(url, tmp_path)
        assert names(url) == []
        process.send_signal(signal.SIGKILL)
    capsys.readouterr()
    fit(url, tmp_path)
    assert f"held by process {process.pid} on" in capsys.readouterr().out
    assert RemoteStore(url).read_file(LOCK) is None


@pytest.mark.parametrize(
    "content", [json.dumps({"host": "elsewhere", "pid": 1, "started": "then"}), "torn"]
)
def test_a_lease_of_another_host_ends_with_its_heartbeat(
    content: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description that does not change for the time of a lease refuses no run,
    whatever its clock says.
    """
    monkeypatch.setattr(lease_module, "_EXPIRES_S", 0.1)
    RemoteStore(url).write_file(LOCK, content.encode(), is_new=True)
    fit(url, tmp_path)
    assert names(url) == ["epoch=1-step=12"]


class Replaces(Callback):
    """Another run takes the URL after the first epoch,
    as if this one had been suspended for long.
    """

    def __init__(self, url: str, content: bytes | None) -> None:
        self.url, self.content = url, content

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Write the other's description, or delete the file as the other does at its end."""
        trainer.checkpoints.wait()
        if trainer.current_epoch == 1 and self.content is None:
            RemoteStore(self.url).remove_file(LOCK)
        elif trainer.current_epoch == 1:
            RemoteStore(self.url).write_file(LOCK, self.content or b"")


@pytest.mark.parametrize(
    ("content", "why"),
    [(THEIRS, "is of another run now: process 7 on .*run_dir=/b"), (None, "was deleted")],
)
def test_a_run_that_lost_its_lease_changes_nothing_and_ends(
    content: bytes | None, why: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither writes its next checkpoint nor removes its last,
    and its error names the other run.
    """
    # none falls between the reading and the writing of the other
    monkeypatch.setattr(lease_module, "_BEAT_S", 60.0)
    with pytest.raises(LeaseLost, match=why):
        fit(url, tmp_path, Replaces(url, content))
    assert names(url) == ["epoch=0-step=6"]
    assert RemoteStore(url).read_file(LOCK) == content  # not released for the other


@pytest.mark.parametrize("content", [b"", b'{"host": "a", "pi'])
def test_a_half_written_heartbeat_ends_no_run(
    content: bytes, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems show a file while it is written: that is no other run's."""
    monkeypatch.setattr(lease_module, "_BEAT_S", 60.0)
    fit(url, tmp_path, Replaces(url, content))
    assert names(url) == ["epoch=1-step=12"]


def test_the_heartbeat_of_a_run_that_lost_its_lease_ends(url: str, tmp_path: Path) -> None:
    """It does not write over the other run's description."""
    with StoreLease(RemoteStore(url), tmp_path) as lease:
        lease.take()
        assert lease._beating is not None
        while lease._beating.is_alive():  # written again if a beat was about to write
            RemoteStore(url).write_file(LOCK, THEIRS)
            lease._beating.join(0.2)
    assert RemoteStore(url).read_file(LOCK) == THEIRS


def test_a_store_without_conditional_writes_is_leased(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system whose pipe_file takes no mode is written to plainly."""
    pipe = MemoryFileSystem.pipe_file

    def plain(self: MemoryFileSystem, path: str, value: bytes) -> None:
        pipe(self, path, value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", plain)
    with StoreLease(RemoteStore(memory), tmp_path) as lease:
        lease.take()
        lease.check()
        with pytest.raises(ConfigError, match="another run is going on"):
            StoreLease(RemoteStore(memory), tmp_path / "b").take()
    assert RemoteStore(memory).read_file(LOCK) is None


def test_a_later_attempt_of_an_elastic_job_takes_its_own_lease(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rank 0 may be another process,
    and a checkpoint of the attempt before may still be on its way.
    """
    monkeypatch.setenv("TRAINKIT_JOB_STARTED", "2030-01-01_00-00-00")
    with StoreLease(RemoteStore(memory), tmp_path) as first:
        first.take()
        with StoreLease(RemoteStore(memory), tmp_path) as second:
            second.take(is_later_attempt=True)
            first.check()
        first.check()
    assert capsys.readouterr().out == ""


def test_a_url_that_cannot_be_written_is_refused(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, with the store's own reason; a later attempt of an elastic job continues."""

    def refuses(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuses)
    with pytest.raises(
        ConfigError, match=rf"dirpath is '{memory}', which cannot be written: Access Denied"
    ):
        fit(memory, tmp_path)
    with StoreLease(RemoteStore(memory), tmp_path) as lease:
        lease.take(is_later_attempt=True)
