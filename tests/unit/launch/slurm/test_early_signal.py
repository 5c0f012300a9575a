"""A signal that reaches a rank of launcher=slurm while it imports ends it with a checkpoint,
as a later one does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkit.launch.slurm.step import REQUEUE

ROOT = Path(__file__).parents[4]
FIT = "fit conf=mlp trainer.max_epochs=50 callbacks=checkpoint run_dir=run"


def blocked(pid: int) -> int:
    """Return the signals that a process holds back, as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_during_imports_waits_for_the_run(number: signal.Signals, tmp_path: Path) -> None:
    """It ends after its first steps with a checkpoint and exit code 0,
    and the script learns that it may requeue.
    """
    env = {**os.environ, REQUEUE: str(tmp_path / "requeue"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "trainkit", *FIT.split()],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    ) as fit:
        deadline = time.monotonic() + 60
        # from the first line of main, long before torch is imported
        while not blocked(fit.pid) >> (number - 1) & 1:
            assert fit.poll() is None and time.monotonic() < deadline
        fit.send_signal(number)
        out, _ = fit.communicate(timeout=120)
    assert fit.returncode == 0, out
    assert f"{number.name} on rank 0: the run ended after step " in out
    assert (tmp_path / "requeue").is_file() and (tmp_path / "run" / "checkpoints" / "last").exists()
