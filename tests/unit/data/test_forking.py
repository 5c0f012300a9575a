"""Loader workers that hang in fork() are replaced, on the versions of Python that let them hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="this Python returns from fork()"
)

# The first forks of the process hang, as a child without the interpreter's lock does; their number
# is kept in a file.
HANG = """
import os, sys, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from trainkit.data import forking
from trainkit.data.workers import start_workers

left = Path("left")


def hang() -> None:
    if (count := int(left.read_text())) > 0:
        left.write_text(str(count - 1))
        time.sleep(600)


os.register_at_fork(after_in_child=hang)
forking.ANSWER_S = 0.5
loader = DataLoader(TensorDataset(torch.arange(8.0)), 2, num_workers=2, persistent_workers=True)
for _ in range(2):
    print([float(batch.sum()) for batch, in start_workers(loader)])
"""


def run(script: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_a_worker_that_hangs_in_fork_is_replaced(tmp_path: Path) -> None:
    """All batches come, in their order;
    each replacement is reported, and none of the hung processes is left.
    """
    (tmp_path / "left").write_text("2")
    done = run(HANG, tmp_path, 60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[1.0, 5.0, 9.0, 13.0]") == 2
    assert (
        done.stdout.count("A loader worker did not return from fork() within 0.5 s and is replaced")
        == 2
    )


def test_forks_that_always_hang_end_the_run(tmp_path: Path) -> None:
    """After five in turn the error says what to do."""
    (tmp_path / "left").write_text("99")
    done = run(HANG, tmp_path, 60)
    assert done.returncode != 0
    assert (
        "DataError: 5 loader workers in turn did not return from fork(). Use Python 3.12"
        in done.stderr
    )
