"""Two hosts, for each test or for those of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.storm.hosts import Hosts, sshd_missing, unavailable

Make = Callable[..., Hosts]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Make]:
    """A function that makes two hosts,
    with sshd if there is one and with the storm's stand-in otherwise.
    """
    if why := unavailable():
        pytest.skip(f"no hosts: {why}")
    with ExitStack() as stack:

        def make(**given: Any) -> Hosts:
            folder = tmp_path / "hosts"
            folder.mkdir()
            return stack.enter_context(
                Hosts(folder, 2, real_ssh=not sshd_missing(), named=True, **given)
            )

        yield make
