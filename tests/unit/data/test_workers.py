"""The start of loader workers where files or shared memory are short, and their end:
with their rank, not by a signal.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


batches = iter(shield(DataLoader(Store(), num_workers=2)))
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


next(iter(workers.shield(DataLoader(Store(), num_workers=1))))
"""


def test_a_worker_of_a_killed_rank_ends() -> None:
    """It holds the rank's output open no longer than until its next look."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == -signal.SIGKILL
