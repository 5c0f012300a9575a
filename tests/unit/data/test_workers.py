"""The start of loader workers where files or shared memory are short, and their end:
with their rank, not by a signal.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainkit.data import workers
from trainkit.data.workers import shield, start_workers
from trainkit.errors import DataError


@pytest.fixture
def limit() -> Iterator[int]:
    """Lower the soft limit of open files, and return the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_get_as_many_files_as_are_allowed(limit: int) -> None:
    """The default of a login is a few hundred, and a batch of many tensors in flight needs more."""
    assert (
        len(list(start_workers(DataLoader(TensorDataset(torch.zeros(8)), 4, num_workers=1)))) == 2
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSPC, "/dev/shm is full"), (errno.EMFILE, "open files"), (errno.EIO, "")],
)
def test_what_is_missing_is_named(code: int, said: str) -> None:
    """And another error stays what it is."""

    class Short(DataLoader[Any]):
        def __iter__(self) -> Any:
            raise OSError(code, "no")

    with pytest.raises(
        DataError if said else OSError, match=f"{said}.*num_workers=0" if said else "no"
    ):
        start_workers(Short(TensorDataset(torch.zeros(8)), num_workers=1))


FAILS = """
import time
from torch.utils.data import DataLoader, Dataset
from trainkit.data.workers import shield
from trainkit.errors import DataError


class Store(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(1 if index == 0 else 600)
        raise DataError("s3://data/0.tar cannot be reached.")


batches = iter(shield(DataLoader(Store(), num_workers=2, multiprocessing_context="fork")))
next(batches)
"""


def test_a_rank_that_fails_ends_its_workers_at_once() -> None:
    """A worker that waits for a store neither delays the rank's end,
    nor is its own end printed after the cause.
    """
    failed = subprocess.run(
        [sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=50, check=False
    )
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("DataError: s3://data/0.tar cannot be reached.")


class _Signalled(Dataset[int]):
    """Its worker gets a scheduler's SIGTERM, and needs its time for the sample."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        return index


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_outlives_the_schedulers_signal(
    monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """The rank answers it; its worker looks for the rank from time to time, and ends with it."""
    monkeypatch.setattr(workers, "LOOK_S", 0.05)
    loader = shield(DataLoader(_Signalled(), num_workers=1, multiprocessing_context=start))
    assert [int(batch) for batch in loader] == [0]


def _close_files() -> None:
    os.closerange(3, 1024)
    time.sleep(0.3)


def test_a_worker_whose_files_are_closed_is_just_ending() -> None:
    """The kernel closes a killed process's files before it has ended."""
    process = multiprocessing.get_context("fork").Process(target=_close_files)
    process.start()
    assert workers.ended_workers(SimpleNamespace(_workers=[process])) == str(process.pid)


LEFT = """
import os
import signal
import time
from torch.utils.data import DataLoader, Dataset
from trainkit.data import workers

workers.LOOK_S = 0.05


class Store(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


next(iter(workers.shield(DataLoader(Store(), num_workers=1, multiprocessing_context="fork"))))
"""


def test_a_worker_of_a_killed_rank_ends() -> None:
    """It holds the rank's output open no longer than until its next look."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == -signal.SIGKILL


KILLED = """
import os
import signal
import sys
import time
from torch.utils.data import DataLoader, Dataset
from trainkit.data.workers import shield, start_workers


class Store(Dataset):
    def __init__(self):
        self.rank = os.getpid()

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(self.rank, signal.SIGKILL)
        time.sleep(600)


if __name__ == "__main__":
    loader = DataLoader(Store(), num_workers=1, multiprocessing_context=sys.argv[1])
    next(start_workers(shield(loader)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("start", ["fork", "forkserver"])  # forkserver: Python 3.14's default
def test_a_worker_that_waits_ends_with_its_killed_rank(tmp_path: Path, start: str) -> None:
    """It holds the rank's GPU no longer, also while it is in a sample that takes forever, and
    without a signal of its own.
    """
    (script := tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, script, start], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_a_worker_of_a_thread_outlives_the_thread() -> None:
    """The kernel counts the thread that has started a worker as its parent: a loader that a thread
    has opened works when the thread has ended.
    """
    opened: list[Iterator[Any]] = []
    loader = shield(DataLoader(TensorDataset(torch.arange(64)), num_workers=1))
    thread = threading.Thread(target=lambda: opened.append(start_workers(loader)))
    thread.start()
    thread.join()
    assert len(list(opened[0])) == 64


class _Held(Dataset[str]):
    """Its worker says what an open file of its rank is there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return os.readlink(f"/proc/self/fd/{self.number}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_lets_go_of_the_gpus_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forked worker has the driver's files of its rank no longer; others stay, and the rank keeps
    its own.
    """
    monkeypatch.setattr(workers, "_GPU_FILES", f"{tmp_path}/nvidia")
    for name, expected in (("nvidia0", "/dev/null"), ("other", f"{tmp_path}/other")):
        with open(tmp_path / name, "w") as file:
            forked = DataLoader(
                _Held(file.fileno()), None, num_workers=1, multiprocessing_context="fork"
            )
            loader = shield(forked)
            assert list(start_workers(loader)) == [expected]
            assert os.readlink(f"/proc/self/fd/{file.fileno()}") == f"{tmp_path}/{name}"
