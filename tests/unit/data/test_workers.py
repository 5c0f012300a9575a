"""The start of loader workers where files or shared memory are short."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainkit.data.workers import start_workers
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
    assert len(list(start_workers(DataLoader(TensorDataset(torch.zeros(8)), 4, num_workers=1)))) == 2
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "/dev/shm is full"), (errno.EMFILE, "open files"), (errno.EIO, "")])
def test_what_is_missing_is_named(code: int, said: str) -> None:
    """And another error stays what it is."""

    class Short(DataLoader[Any]):
        def __iter__(self) -> Any:
            raise OSError(code, "no")

    with pytest.raises(DataError if said else OSError, match=f"{said}.*num_workers=0" if said else "no"):
        start_workers(Short(TensorDataset(torch.zeros(8)), num_workers=1))
